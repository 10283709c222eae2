"""The plugin as vLLM gets it: a directory on `PYTHONPATH` with the package and its entry point."""

from pathlib import Path

import stallwatch

FLAGS = ("--enable-logging-iteration-details", "--enable-mfu-metrics", "--disable-log-stats")
"""What the plugin and the write counter need; `--disable-log-stats` only silences the line that vLLM logs each step."""


def mounted(folder: Path) -> dict[str, str]:
    """Fills `folder` and returns the variables that make vLLM find the plugin in it."""
    source = Path(stallwatch.__file__).parent
    package, info = folder / "stallwatch", folder / f"stallwatch-{stallwatch.__version__}.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    for name in ("__init__.py", "vllm_plugin.py"):
        (package / name).write_text((source / name).read_text())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stallwatch\nVersion: {stallwatch.__version__}\n")
    (info / "entry_points.txt").write_text(
        "[vllm.stat_logger_plugins]\nstallwatch = stallwatch.vllm_plugin:StepLogger\n"
    )
    return {"PYTHONPATH": str(folder)}
