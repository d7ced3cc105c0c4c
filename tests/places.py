"""Where the checkout is, and the configurations that come with the package."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "tff_pdp" / "configs"
DEMO = CONFIGS / "demo.yaml"
