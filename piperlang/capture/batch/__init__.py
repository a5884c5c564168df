"""What the batch may become: programs of any size, and whether its samples are independent."""
