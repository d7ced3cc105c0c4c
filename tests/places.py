"""Where the checkout is, and its configurations."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
DEMO = CONFIGS / "demo.yaml"
