"""Numbers for people, in the units of the measures."""


def duration(seconds: float) -> str:
    """A time to go, coarse."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def told(seconds: float | None) -> str:
    """Three figures and a unit."""
    if seconds is None:
        return "-"
    size = abs(seconds)
    if size < 0.000005:
        return "0 s"
    if size < 0.00995:
        return f"{seconds * 1000:.2f} ms"
    if size < 0.0995:
        return f"{seconds * 1000:.1f} ms"
    if size < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if size < 9.995 else f"{seconds:,.1f} s"


def figure(unit: str, value: float | None) -> str:
    """A value with its unit."""
    if value is None:
        return "-"
    value = value if abs(value) >= 0.005 or unit == "seconds" else 0.0
    if unit == "seconds":
        return told(value)
    if unit == "ratio":
        return f"{value * 100:.1f} %"
    if unit == "hertz":
        return f"{value / 1e9:.2f} GHz"
    if unit == "watts":
        return f"{value:,.0f} W"
    if unit == "tokens_per_second":
        return f"{value:,.0f} tokens/s" if abs(value) >= 100 else f"{value:.1f} tokens/s"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.1f}"
