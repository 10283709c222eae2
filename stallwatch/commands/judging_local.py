"""What our own side allows: GPU counters, the CPU limit, our own lateness, pressure, RDMA. Pure."""

from collections.abc import Iterator

from stallwatch.commands.finding import Area, Finding, Level
from stallwatch.commands.survey import Lateness, Local
from stallwatch.commands.terminal import duration
from stallwatch.settings import Settings
from stallwatch.sources.gpu import GpuStatus
from stallwatch.sources.host import CpuLimit

_ORDINARY_LATENESS = 0.02  # two rounds of the sleeper: any loop's daily life
_DOUBT = 2.0  # gaps shorter than so many times our own lateness say more about us than about the server


def local_findings(local: Local, settings: Settings) -> Iterator[Finding]:
    """All of it."""
    yield _gpu(local, settings)
    yield _cpu_limit(local.cpu_limit, settings)
    if local.lateness is not None:
        yield _lateness(local.lateness, settings)
    yield from _host(local, settings)


def _gpu(local: Local, settings: Settings) -> Finding:
    status = local.gpu_status
    if status is None:
        return Finding(
            area=Area.HERE, subject="GPU", level=Level.OK, says="off: gpu.enabled is false", facts={"visible": 0}
        )
    why = status.off or status.problem
    if local.gpu is None:
        demanded = settings.gpu.enabled == "true"
        return Finding(
            area=Area.HERE,
            subject="GPU",
            level=Level.PROBLEM if demanded else Level.WARNING,
            says=f"none visible: {why}" if why else "none visible",
            remedy="set gpu.enabled to auto if there is none to be read"
            if demanded
            else "everything else works without; clocks and power are then no evidence",
            degrades=demanded,
            facts={"visible": 0, "reason": why},
        )
    return _visible(local, status)


def _visible(local: Local, status: GpuStatus) -> Finding:
    names = sorted({name for _, _, name in status.gpus if name})
    scope = local.gpu.scope if local.gpu is not None else None
    absent = {gpu: dict(figures) for gpu, figures in status.absent.items() if figures}
    lacking = sorted({figure for figures in absent.values() for figure in figures})
    says = f"{len(status.gpus)} visible ({', '.join(names[:3]) or 'no name'}), driver {status.driver or 'not told'}"
    says += f"; not given: {', '.join(lacking)}" if lacking else ""
    says += f"; does not answer: GPU {', '.join(status.lost)}" if status.lost else ""
    everything = scope == "node" and len(status.gpus) > 1
    if everything:
        says += "; all GPUs of the node are seen, and nothing says which are vLLM's"
    return Finding(
        area=Area.HERE,
        subject="GPU",
        level=Level.WARNING if everything or status.lost else Level.OK,
        says=says,
        remedy="name vLLM's in gpu.devices, by index or UUID" if everything else "",
        facts={
            "visible": len(status.gpus),
            "driver": status.driver,
            "scope": scope,
            "gpus": [{"index": gpu, "uuid": uuid, "name": name} for gpu, uuid, name in status.gpus],
            "absent": absent,
            "lost": list(status.lost),
        },
    )


def _cpu_limit(limit: CpuLimit | None, settings: Settings) -> Finding:
    if limit is None:
        return Finding(
            area=Area.HERE,
            subject="CPU limit",
            level=Level.OK,
            says="none on our own cgroup that can be seen",
            facts={"cpus": None},
        )
    pause = limit.longest_pause
    doubt = _DOUBT * pause
    facts = {
        "cpus": limit.cpus,
        "quota_seconds": limit.quota,
        "period_seconds": limit.period,
        "pause_seconds": pause,
        "believable_from_seconds": doubt,
    }
    size = f"limit {limit.cpus * 1000:.0f}m"
    if pause <= 0:
        return Finding(
            area=Area.HERE,
            subject="CPU limit",
            level=Level.OK,
            says=f"{size}: our loop, which is one thread, is never paused by it",
            facts=facts,
        )
    blinding = doubt >= settings.stall.floor_seconds
    return Finding(
        area=Area.HERE,
        subject="CPU limit",
        level=Level.WARNING,
        says=f"{size}: {duration(limit.quota)} in every {duration(limit.period)}, so pauses of {duration(pause)} are "
        f"possible; a gap shorter than {duration(doubt)} is not believable while we are paused, and is left out",
        remedy="set no CPU limit on this container (a request is enough), or a higher one",
        degrades=blinding,
        facts=facts,
    )


def _lateness(late: Lateness, settings: Settings) -> Finding:
    worst = late.worst
    facts = {
        "worst_seconds": worst,
        "measured_seconds": late.seconds,
        "throttled_seconds": late.throttled,
        "believable_from_seconds": _DOUBT * worst if worst >= _ORDINARY_LATENESS else 0.0,
    }
    says = f"{duration(worst)} at worst in {duration(late.seconds)}"
    if late.throttled:
        says += f", and throttled for {duration(late.throttled)}"
    if worst < _ORDINARY_LATENESS and not late.throttled:
        return Finding(area=Area.HERE, subject="own lateness", level=Level.OK, says=says, facts=facts)
    if worst >= _ORDINARY_LATENESS:
        says += f"; gaps shorter than {duration(_DOUBT * worst)} around such a moment are left out"
    return Finding(
        area=Area.HERE,
        subject="own lateness",
        level=Level.WARNING,
        says=says,
        remedy="give this container CPU of its own (a request, and no limit); the machine's CPUs are busy",
        degrades=_DOUBT * worst >= settings.stall.floor_seconds,
        facts=facts,
    )


def _host(local: Local, settings: Settings) -> Iterator[Finding]:
    if not settings.host.enabled:
        yield Finding(area=Area.HERE, subject="host", level=Level.OK, says="off: host.enabled is false")
        return
    if local.host is None:
        trouble = local.host_trouble
        yield Finding(
            area=Area.HERE,
            subject="host",
            level=Level.WARNING,
            says="its files do not answer" + (f": {trouble.detail}" if trouble is not None else ""),
            remedy="are host.proc_path and host.sys_path where procfs and sysfs are mounted?",
        )
        return
    resources = sorted({resource for resource, _ in local.host.pressure_seconds})
    yield Finding(
        area=Area.HERE,
        subject="pressure (PSI)",
        level=Level.OK,
        says=f"readable for {', '.join(resources)}"
        if resources
        else "not readable: the kernel has none, or it is switched off (psi=1 turns it on)",
        facts={"resources": resources},
    )
    ports = local.host.rdma
    shown = [
        f"{port.device}/{port.port}"
        + (f" {port.rate_gbps:g} Gb/s" if port.rate_gbps is not None else "")
        + ("" if port.active is None or port.active else " (down)")
        for port in ports
    ]
    yield Finding(
        area=Area.HERE,
        subject="RDMA ports",
        level=Level.OK,
        says=", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "") if shown else "none",
        facts={"ports": shown},
    )
    if settings.host.engine_cgroup is not None and local.host.engine_throttled_seconds is None:
        yield Finding(
            area=Area.HERE,
            subject="vLLM's cgroup",
            level=Level.WARNING,
            says=f"{settings.host.engine_cgroup} tells no throttling: it has no CPU limit, or is not its cgroup",
            remedy="correct host.engine_cgroup, or leave it out",
        )
