"""A private, real Slurm cluster on one machine."""

from slurm.sandbox.sandbox import Sandbox
from slurm.sandbox.spec import SandboxError, SandboxUnavailable

__all__ = ["Sandbox", "SandboxError", "SandboxUnavailable"]
