"""Headless Chromium, for tests of pages."""

from __future__ import annotations

import shutil

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "no-first-run",
)
