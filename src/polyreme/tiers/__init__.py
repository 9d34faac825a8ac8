"""Where numbers live that the device has no room for: host memory or files, read ahead of use and written behind it."""

from polyreme.tiers.file import FileTier
from polyreme.tiers.host import HostTier
from polyreme.tiers.tier import Stream, Tier, Traffic

__all__ = ["FileTier", "HostTier", "Stream", "Tier", "Traffic"]
