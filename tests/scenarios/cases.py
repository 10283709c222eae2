"""Cases built from public reports: levels and shapes as reported, shortened to a minute or two.

`source` names the report. `cause` is what it comes down to, as the simulator's own ground truth must confirm; None is
a look-alike in which nobody may be said to stall. A verdict may be `unknown` only where `unseen` says why the truth
cannot be seen from outside; never may it be another cause.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.cost import Cause, Pause, Slowdown, StepCost
from stallwatch.simulator.faults import Fault, FaultKind, repeated
from stallwatch.simulator.load import Arrival, Load, Users, every
from stallwatch.simulator.scenario import Scenario, ServerConfig
from stallwatch.simulator.scenarios import SCENARIOS


def later(scenario: Scenario, seconds: float) -> Scenario:
    """The same scenario that much later, against polls and pulses; what was there from the start still is."""

    def at(time: float) -> float:
        return time + seconds if time > 0 else time

    load, engine = scenario.load, scenario.engine
    return replace(
        scenario,
        duration=scenario.duration + seconds,
        load=Load(
            tuple(replace(arrival, at=arrival.at + seconds) for arrival in load.arrivals),
            tuple(replace(users, start=users.start + seconds, end=users.end + seconds) for users in load.users),
        ),
        engine=replace(
            engine,
            acceptance_changes=tuple((at(since), share) for since, share in engine.acceptance_changes),
            admission_closed=tuple((at(start), at(end)) for start, end in engine.admission_closed),
        ),
        slowdowns=tuple(replace(slow, start=at(slow.start), end=at(slow.end)) for slow in scenario.slowdowns),
        pauses=tuple(replace(pause, at=at(pause.at)) for pause in scenario.pauses),
        faults=tuple(replace(fault, start=at(fault.start), end=at(fault.end)) for fault in scenario.faults),
        sleeps=tuple(replace(nap, start=at(nap.start), end=at(nap.end)) for nap in scenario.sleeps),
        observer_lag=tuple(replace(lag, at=at(lag.at)) for lag in scenario.observer_lag),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. `also` are causes that are true of parts of it, coarser names of the same truth included."""

    id: str
    source: str
    scenario: Scenario
    cause: Cause | None
    mode: str = "persistent"  # of the canary, or "off"
    also: frozenset[Cause] = frozenset()
    unseen: str = ""
    host: bool = False
    rooms: Mapping[str, object] = field(default_factory=dict)
    idle: bool = False  # nobody asks while it happens, whatever the fault does to the server
    long: bool = False


def _readers(count: int, *, tokens: int = 3_000, prompt: int = 64, stagger: float = 1.0) -> tuple[Users, ...]:
    return (Users(count=count, prompt_tokens=prompt, output_tokens=tokens, stagger=stagger),)


def _case(
    name: str,
    source: str,
    cause: Cause | None,
    *,
    load: Load,
    duration: float = 60.0,
    engine: EngineConfig | None = None,
    server: ServerConfig | None = None,
    slowdowns: tuple[Slowdown, ...] = (),
    pauses: tuple[Pause, ...] = (),
    faults: tuple[Fault, ...] = (),
    **more: object,
) -> Case:
    scenario = Scenario(
        name=name,
        sentence=f"{source}.",
        duration=duration,
        cause=cause or Cause.NONE,
        engine=engine or EngineConfig(),
        server=server or ServerConfig(),
        load=load,
        slowdowns=slowdowns,
        pauses=pauses,
        faults=faults,
    )
    return Case(id=name, source=source, scenario=scenario, cause=cause, **more)  # type: ignore[arg-type]


_SPARK = StepCost(base=0.036, per_prefill_token=0.00042, per_prefill_context=4e-10)
_THREE = Load(users=_readers(3))


def _from_set(name: str, source: str, mode: str, **more: object) -> Case:
    scenario = SCENARIOS[name]
    cause = None if scenario.cause is Cause.NONE else scenario.cause
    return Case(id=f"{name}-{mode}", source=source, scenario=scenario, cause=cause, mode=mode, **more)  # type: ignore[arg-type]


PUBLIC: tuple[Case, ...] = (
    # group A, prefill beside readers
    _from_set("long-prefill", "vllm-project/vllm#54919", "off"),
    _case(
        "two-cold-prompts",
        "blazux/qwen3.8-Flash-DGX#9",
        Cause.PREFILL,
        duration=110.0,
        engine=EngineConfig(max_num_batched_tokens=8192, max_num_seqs=64, cost=_SPARK, num_gpu_blocks=32768),
        load=Load(every(0.1, Arrival(at=20.0, prompt_tokens=72_000, output_tokens=40), times=2), _readers(1)),
        mode="pulse",
    ),
    _case(
        "prompt-beside-paging",
        "blazux/qwen3.8-Flash-DGX#9, the gather that misses the page cache",
        Cause.HOST_PRESSURE,
        duration=80.0,
        engine=EngineConfig(max_num_batched_tokens=2048, cost=_SPARK),
        load=Load((Arrival(at=30.0, prompt_tokens=16_000, output_tokens=40),), _readers(2)),
        slowdowns=(Slowdown(start=29.0, end=65.0, extra=2.4, cause=Cause.HOST_PRESSURE),),
        host=True,
    ),
    _case(
        "mixed-prefill-41x",
        "local-inference-lab/vllm#541",
        Cause.PREFILL,
        duration=50.0,
        engine=EngineConfig(
            max_num_batched_tokens=600,
            cost=StepCost(base=0.0036, per_prefill_token=0.00025, per_decode_request=0.0001, per_prefill_context=0),
        ),
        load=Load((Arrival(at=15.0, prompt_tokens=65_535, output_tokens=1),), _readers(1, tokens=12_000)),
        mode="pulse",
    ),
    _case(
        "cold-prefill-11x",
        "MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks#6",
        Cause.PREFILL,
        duration=50.0,
        engine=EngineConfig(
            max_num_batched_tokens=256,
            cost=StepCost(base=0.019, per_prefill_token=0.0007, per_prefill_context=0),
        ),
        load=Load((Arrival(at=15.0, prompt_tokens=24_000, output_tokens=60),), _readers(1)),
    ),
    _case(
        "agents-capacity-waiting",
        "MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#140",
        Cause.PREFILL,
        duration=70.0,
        engine=EngineConfig(max_num_batched_tokens=2048, cost=_SPARK),
        load=Load(every(2.0, Arrival(at=20.0, prompt_tokens=6_000, output_tokens=80), times=10), _readers(2)),
        mode="pulse",
        also=frozenset({Cause.ADMISSION}),
    ),
    _case(
        "capped-prefills",
        "MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#114",
        Cause.PREFILL,
        duration=50.0,
        engine=EngineConfig(
            max_num_batched_tokens=2048,
            long_prefill_token_threshold=256,
            cost=StepCost(base=0.018, per_prefill_token=0.0009, per_prefill_context=0),
        ),
        load=Load(every(6.0, Arrival(at=15.0, prompt_tokens=5_000, output_tokens=30), times=4), _readers(2)),
    ),
    _case(
        "fragmented-multimodal",
        "sgl-project/sglang#31395",
        Cause.PREFILL,
        duration=45.0,
        engine=EngineConfig(cost=StepCost(base=0.008, per_prefill_token=0.0004, per_prefill_context=0)),
        load=Load(every(0.32, Arrival(at=15.0, prompt_tokens=640, output_tokens=2), times=50), _readers(4)),
        mode="off",
    ),
    _case(
        "no-chunking",
        "ddalcu/mlx-serve#205",
        Cause.PREFILL,
        engine=EngineConfig(
            enable_chunked_prefill=False,
            max_num_batched_tokens=131_072,
            cost=StepCost(base=0.0095, per_prefill_token=0.000088, per_prefill_context=1.1e-9),
        ),
        load=Load(
            (
                Arrival(at=20.0, prompt_tokens=9_100, output_tokens=40),
                Arrival(at=35.0, prompt_tokens=52_900, output_tokens=40),
            ),
            _readers(2, tokens=8_000),
        ),
    ),
    _case(
        "p99-hidden-by-means",
        "ashwanijha.dev, what the Sarathi paper says",
        Cause.PREFILL,
        duration=80.0,
        engine=EngineConfig(
            max_num_batched_tokens=16_384, cost=StepCost(base=0.042, per_prefill_token=0.0004, per_prefill_context=0)
        ),
        load=Load(every(22.0, Arrival(at=15.0, prompt_tokens=7_900, output_tokens=60), times=3), _readers(3)),
        mode="pulse",
    ),
    # group B, admission and memory
    _from_set("kv-offload-wait", "Tanguille/cluster#4593", "off"),
    _case(
        "offload-deadlock",
        "vllm-project/vllm#45387",
        Cause.KV_TRANSFER,
        server=ServerConfig(kv_connector=True),
        load=Load(
            every(
                1.0,
                Arrival(at=10.0, prompt_tokens=8_000, output_tokens=50, external_tokens=7_992, transfer_seconds=1e5),
                times=6,
            )
        ),
        mode="pulse",
    ),
    _from_set("admission-livelock", "vllm-project/vllm-metal#479", "off"),
    _case(
        "load-convoy",
        "vllm-project/vllm#44294",
        Cause.KV_TRANSFER,
        duration=70.0,
        engine=EngineConfig(serial_transfers=True),
        server=ServerConfig(kv_connector=True),
        load=Load(
            every(
                0.1,
                Arrival(at=15.0, prompt_tokens=10_000, output_tokens=60, external_tokens=9_984, transfer_seconds=1.9),
                times=16,
            ),
            _readers(2),
        ),
        mode="pulse",
    ),
    _from_set("kv-preemption", "vllm-project/vllm#18115", "off"),
    _case(
        "prefill-at-full-queue",
        "vllm-project/vllm#37307",
        Cause.PREFILL,
        duration=60.0,
        engine=EngineConfig(
            max_num_batched_tokens=8192,
            num_gpu_blocks=40_000,
            cost=StepCost(base=0.02, per_prefill_token=0.00006, per_prefill_context=0),
        ),
        load=Load(every(0.01, Arrival(at=15.0, prompt_tokens=3_000, output_tokens=120), times=100), _readers(2)),
        mode="off",
    ),
    _case(
        "transfer-spikes",
        "vllm-project/vllm#53333",
        None,
        load=_THREE,
        slowdowns=(Slowdown(start=10.0, extra=0.005, cause=Cause.KV_TRANSFER),),
        pauses=tuple(Pause(at=12.0 + 1.7 * i, seconds=0.048, cause=Cause.KV_TRANSFER) for i in range(25)),
    ),
    # group C, what is slower for good
    _case(
        "bimodal-at-start",
        "ROCm/legacy-rocm-build#6347",
        None,
        load=_THREE,
        slowdowns=(Slowdown(start=0.0, factor=1.27, cause=Cause.UNKNOWN),),
        mode="pulse",
    ),
    _case(
        "clock-correlated",
        "jundot/omlx#2689",
        None,
        duration=70.0,
        engine=EngineConfig(cost=StepCost(base=0.0819)),
        load=_THREE,
        slowdowns=(Slowdown(start=35.0, factor=1.65, cause=Cause.GPU_CLOCK),),
    ),
    _from_set("power-cap-harmless", "ashalliants/ninfer-3090#72", "pulse"),
    _case(
        "lower-power-cap",
        "noonghunna/club-3090#58",
        None,
        load=_THREE,
        slowdowns=(Slowdown(start=30.0, factor=1.52, cause=Cause.GPU_CLOCK),),
        mode="pulse",
    ),
    _case(
        "graph-capture-edge",
        "vllm-ascend#14440",
        Cause.UNKNOWN,
        duration=70.0,
        load=Load(users=_readers(4)),
        slowdowns=(Slowdown(start=40.0, factor=3.9, cause=Cause.UNKNOWN),),
        rooms={"gpu": {"enabled": "false"}},
        unseen="every step is slower, and nothing else changes",
    ),
    _from_set("acceptance-collapse", "vllm-project/vllm#11188, noonghunna/club-3090#1052", "pulse"),
    _case(
        "acceptance-gone-then-silence",
        "vllm-ascend#10495",
        Cause.ENGINE_HANG,
        duration=100.0,
        engine=EngineConfig(num_speculative_tokens=3, acceptance=0.85, acceptance_changes=((25.0, 0.0),)),
        load=_THREE,
        pauses=(Pause(at=45.0, seconds=1e9, cause=Cause.ENGINE_HANG, gpu_busy=True),),
        mode="pulse",
    ),
    # group D, the engine or its host stands still
    _from_set("jit-pause", "vllm-project/vllm-ascend#14324", "off"),
    _case(
        "jit-on-one-rank",
        "sgl-project/sglang#19588",
        Cause.GPU_IDLE,
        server=ServerConfig(data_parallel_size=2),
        load=Load(
            users=(
                Users(count=2, prompt_tokens=64, output_tokens=900, rank=0),
                Users(count=2, prompt_tokens=64, output_tokens=900, rank=1),
            )
        ),
        pauses=(Pause(at=25.0, seconds=15.0, cause=Cause.GPU_IDLE),),
        rooms={"gpu": {"devices": "0,1"}},  # else nobody knows whether other GPUs of the node are this server's
        mode="pulse",
    ),
    _case(
        "jits-on-first-requests",
        "syv-ai/qwen38-27b-rtx3090#155",
        Cause.GPU_IDLE,
        load=Load(users=(Users(count=2, prompt_tokens=64, output_tokens=900, start=2.0),)),
        pauses=tuple(Pause(at=8.0 + 2.1 * i, seconds=1.0, cause=Cause.GPU_IDLE) for i in range(12)),
    ),
    _case(
        "api-process-blocked",
        "MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks#19",
        Cause.DELIVERY,
        duration=70.0,
        load=_THREE,
        faults=(Fault(FaultKind.FRONTEND, 25.0, 37.0),),
    ),
    _case(
        "gc-pauses",
        "vllm-project/vllm#12287, #14902",
        None,
        load=_THREE,
        faults=repeated(FaultKind.FRONTEND, start=15.0, until=50.0, period=2.0, lasts=0.17),
    ),
    _case(
        "detokenizer-drift",
        "vllm-project/vllm#24174",
        None,
        duration=80.0,
        load=_THREE,
        slowdowns=tuple(Slowdown(start=10.0 * i, extra=0.0007, cause=Cause.UNKNOWN) for i in range(1, 7)),
    ),
    _case(
        "hang-after-a-large-prompt",
        "vllm-project/vllm#41834",
        Cause.ENGINE_HANG,
        duration=110.0,
        load=Load((Arrival(at=20.0, prompt_tokens=60_000, output_tokens=50),), _readers(3)),
        pauses=(Pause(at=30.0, seconds=1e9, cause=Cause.ENGINE_HANG, gpu_busy=True),),
        also=frozenset({Cause.PREFILL}),
        unseen="a prompt is open: from outside it may be one enormous step",
        mode="pulse",
    ),
    _case(
        "silent-mid-decode",
        "peonist-ai/halogen-flash-server#3",
        Cause.ENGINE_HANG,
        duration=110.0,
        load=Load(users=_readers(2)),
        pauses=(Pause(at=30.0, seconds=60.0, cause=Cause.ENGINE_HANG),),
        also=frozenset({Cause.GPU_IDLE}),
        mode="off",
    ),
    _case(
        "allreduce-hang",
        "vllm-project/vllm#2734, #6370",
        Cause.ENGINE_HANG,
        duration=90.0,
        load=Load(users=_readers(1)),
        pauses=(Pause(at=30.0, seconds=1e9, cause=Cause.ENGINE_HANG, gpu_busy=True),),
    ),
    # group E, the way to the reader
    _from_set("proxy-buffering", "confidential-dot-ai/c8s#140", "pulse"),
    _case(
        "answer-in-one-batch",
        "BerriAI/litellm#29557",
        Cause.DELIVERY,
        duration=90.0,
        load=_THREE,
        faults=(Fault(FaultKind.BUFFERING, 0.0, value=1e9),),
        rooms={"canary": {"tokens": 500, "tokens_per_minute": 2_000, "interval_seconds": 25}},
        mode="pulse",
    ),
    _from_set("observer-late", "llm-d/llm-d-benchmark#261", "persistent"),
    # look-alikes
    _case(
        "scrape-gap",
        "scrapes that take long",
        None,
        load=_THREE,
        faults=(Fault(FaultKind.METRICS_SLOW, 20.0, 30.0, value=1.5),),
    ),
    _case(
        "runaway-and-long-queue",
        "one endless answer and a queue that moves",
        None,
        engine=EngineConfig(max_num_seqs=4),
        load=Load(
            (Arrival(at=0.0, prompt_tokens=64, output_tokens=100_000),),
            (Users(count=9, prompt_tokens=64, output_tokens=60, stagger=0.3),),
        ),
        mode="pulse",
    ),
    _case(
        "restart-of-an-idle-server",
        "counters that start anew while nobody asks",
        None,
        load=Load(users=(Users(count=2, prompt_tokens=64, output_tokens=60, end=10.0),)),
        faults=(Fault(FaultKind.RESTART, 30.0, 38.0),),
        mode="off",
        idle=True,
    ),
    _case(
        "batch-grows",
        "tokens per request halve as the batch grows",
        None,
        engine=EngineConfig(max_num_batched_tokens=4096),
        load=Load(users=(Users(count=128, prompt_tokens=16, output_tokens=500, start=20.0, stagger=0.02),)),
        mode="pulse",
    ),
)


_PERSISTENT = frozenset({"frontend-bound", "proxy-buffering", "process-frozen", "observer-late", "degraded", "latch"})
"""What only a reader that is always there is sure to see."""

_BY_METRICS = frozenset({"kv-offload-wait", "kv-preemption", "admission-livelock", "jit-pause", "long-prefill"})
"""What stands in the quick set without a canary, among the public cases."""

_NOTES: Mapping[str, Mapping[str, object]] = {
    "process-frozen": {"unseen": "nothing can be read while the process is stopped, and it is back before any limit"},
    # The first time they come they are not cached.
    "long-prefill-cached": {"also": frozenset({Cause.PREFILL})},
    "whole-prompt-repeats": {"also": frozenset({Cause.PREFILL})},
    "prefill-only": {"also": frozenset({Cause.PREFILL})},
}


def _own(name: str, mode: str) -> Case:
    case = _from_set(name, "the simulator's own set", mode)
    return replace(
        case,
        host=case.cause in {Cause.HOST_PRESSURE, Cause.INTERCONNECT},
        long=(mode == "persistent") != (name in _PERSISTENT) or name in _BY_METRICS,
        **_NOTES.get(name, {}),  # type: ignore[arg-type]
    )


OWN: tuple[Case, ...] = tuple(_own(name, mode) for name in SCENARIOS for mode in ("persistent", "pulse"))

CASES: tuple[Case, ...] = tuple({case.id: case for case in (*OWN, *PUBLIC)}.values())
