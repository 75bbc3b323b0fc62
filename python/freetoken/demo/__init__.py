"""The demo model: a small Mixture-of-Experts model made from a real dense one."""

from freetoken.demo.build import DEMO_DESCRIPTION, demo_model_path, ensure_demo_model

__all__ = ["DEMO_DESCRIPTION", "demo_model_path", "ensure_demo_model"]
