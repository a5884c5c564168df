"""The workers of a job: Ray, started for one job or joined by address. The only folder that imports Ray."""

from piperlang.runtime.driver.cluster.cluster import Call, Cluster, Patience
from piperlang.runtime.driver.cluster.packing import pack

__all__ = ["Call", "Cluster", "Patience", "pack"]
