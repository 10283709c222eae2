"""The named scenarios: one sentence each for a person, levels and shapes from public reports, and the true verdict.

They are short (a minute or two) so that the whole set can be run through the real sources in virtual time. Steps
take about 32 ms, the pace of the machines in the reports, unless the case says otherwise. `cause` and `kind` are
what readers suffered; a look-alike has `none`. A detector may always answer `unknown`, never a wrong cause.
"""

from collections.abc import Mapping

from stallwatch.simulator.config import EngineConfig
from stallwatch.simulator.cost import Cause, Pause, Slowdown
from stallwatch.simulator.faults import Fault, FaultKind, Sleep, repeated
from stallwatch.simulator.load import Arrival, Load, Users, every, poisson
from stallwatch.simulator.scenario import GpuProfile, Lag, Scenario, ServerConfig, StallKind

READERS = Users(count=3, prompt_tokens=64, output_tokens=400, stagger=3.0)
_FEW = Load(users=(READERS,))


def _with(*arrivals: Arrival) -> Load:
    return Load(arrivals, (READERS,))


_ALL = (
    Scenario(
        name="quiet",
        sentence="Three readers, short prompts, nothing wrong.",
        load=_FEW,
    ),
    # vllm-project/vllm#54919: running 3-4, waiting 0, KV low, no preemption, 0.5-5 tok/s in sum while it lasts.
    Scenario(
        name="long-prefill",
        sentence="A prompt of 60,000 tokens is computed in chunks, and three readers get a token a second meanwhile.",
        duration=90.0,
        cause=Cause.PREFILL,
        kind=StallKind.DECODE,
        load=Load(
            (Arrival(at=25.0, prompt_tokens=60_000, output_tokens=100),),
            (Users(count=3, prompt_tokens=64, output_tokens=1_600, stagger=1.0),),
        ),
    ),
    Scenario(
        name="long-prefill-cached",
        sentence="The same long prompt comes again and again, all of it cached, and nobody notices.",
        load=Load(
            every(12.0, Arrival(at=0.5, prompt_tokens=20_000, output_tokens=60, identity=1), times=5),
            (Users(count=3, prompt_tokens=64, output_tokens=400, stagger=3.0, start=11.0),),
        ),
    ),
    # vllm-project/vllm#37307: decode held down purely by admission of ordinary prompts, none of them long.
    Scenario(
        name="medium-prompts",
        sentence="A steady flow of prompts of 1,800 tokens keeps every step slow, although no prompt is long.",
        duration=80.0,
        cause=Cause.PREFILL,
        kind=StallKind.DECODE,
        load=_with(*every(1.0, Arrival(at=20.0, prompt_tokens=1_800, output_tokens=12), times=40)),
    ),
    # vllm-project/vllm#18115: flat throughput while KV climbs, then a saw-tooth once it is full.
    Scenario(
        name="kv-preemption",
        sentence="Eight long answers outgrow the KV cache, and requests are thrown out and recomputed in turn.",
        duration=120.0,
        cause=Cause.PREEMPTION,
        kind=StallKind.DECODE,
        engine=EngineConfig(num_gpu_blocks=640, max_model_len=8192),
        load=Load(users=(Users(count=8, prompt_tokens=400, output_tokens=1_600, stagger=1.0),)),
    ),
    # Tanguille/cluster#4593: one running, five waiting, KV a third free, loads of 10-95 s one after another.
    Scenario(
        name="kv-offload-wait",
        sentence="Prompts wait for their KV to be loaded from slow storage, one after another, while the GPU idles.",
        duration=120.0,
        cause=Cause.KV_TRANSFER,
        kind=StallKind.ADMISSION,
        engine=EngineConfig(serial_transfers=True),
        server=ServerConfig(kv_connector=True),
        load=Load(
            every(
                9.0,
                Arrival(at=20.0, prompt_tokens=9_000, output_tokens=50, external_tokens=8_992, transfer_seconds=21.0),
                times=6,
            ),
            (Users(count=1, prompt_tokens=64, output_tokens=600),),
        ),
    ),
    Scenario(
        name="queue-full",
        sentence="All sequence slots are taken by long answers, and newcomers wait their turn while readers are fine.",
        duration=90.0,
        cause=Cause.ADMISSION,
        kind=StallKind.ADMISSION,
        engine=EngineConfig(max_num_seqs=4),
        load=Load(users=(Users(count=12, prompt_tokens=64, output_tokens=700, stagger=0.5),)),
    ),
    # jundot/omlx#2689: the clock falls and no thermal flag says so.
    Scenario(
        name="gpu-clock-drop",
        sentence="The GPU's clock falls to a quarter and every step takes four times as long.",
        duration=80.0,
        cause=Cause.GPU_CLOCK,
        kind=StallKind.DEGRADED,
        load=_FEW,
        slowdowns=(Slowdown(start=30.0, end=60.0, factor=4.0, cause=Cause.GPU_CLOCK),),
        gpu=GpuProfile(thermal_flag=False),
    ),
    # ashalliants/ninfer-3090#72: the power-cap bit is set in nearly every sample under load, and nothing is wrong.
    Scenario(
        name="power-cap-harmless",
        sentence="The GPU runs at its power cap the whole time, as GPUs do, and readers are fine.",
        load=_FEW,
        gpu=GpuProfile(power_capped=True, busy_watts=700.0, sm_clock_mhz=1510.0),
    ),
    # vllm-project/vllm#41834: a large prefill lands, then no token ever again with requests running; health says 200.
    Scenario(
        name="engine-hang",
        sentence="The engine stops stepping for good while requests are running, and says it is healthy.",
        duration=100.0,
        cause=Cause.ENGINE_HANG,
        kind=StallKind.DECODE,
        load=_FEW,
        pauses=(Pause(at=30.0, seconds=1e9, cause=Cause.ENGINE_HANG, gpu_busy=True),),
    ),
    Scenario(
        name="engine-restart",
        sentence="The server dies and is back after fifteen seconds with all counters at zero.",
        duration=80.0,
        cause=Cause.ENGINE_DOWN,
        kind=StallKind.ENGINE,
        load=_FEW,
        faults=(Fault(FaultKind.RESTART, 30.0, 45.0),),
    ),
    # vllm-project/vllm-ascend#14324: recompilation from varying draft acceptance, holes of 1-2 s.
    Scenario(
        name="jit-pause",
        sentence="A kernel is compiled in the middle of serving, and the GPU idles for two seconds.",
        cause=Cause.GPU_IDLE,
        kind=StallKind.DECODE,
        load=_FEW,
        pauses=(
            Pause(at=20.0, seconds=2.1, cause=Cause.GPU_IDLE),
            Pause(at=40.0, seconds=1.4, cause=Cause.GPU_IDLE),
        ),
    ),
    # vllm-project/vllm#12287, #14902: the API process is the bottleneck; the engine's own latencies stay normal.
    Scenario(
        name="frontend-bound",
        sentence="The API process is busy for over a second at a time: tokens leave late, the engine is on time.",
        cause=Cause.DELIVERY,
        kind=StallKind.DECODE,
        load=_FEW,
        faults=repeated(FaultKind.FRONTEND, start=20.0, until=50.0, period=1.5, lasts=1.2),
    ),
    # confidential-dot-ai/c8s#140, BerriAI/litellm#29557: a proxy passes the stream on in full buffers.
    Scenario(
        name="proxy-buffering",
        sentence="A proxy in front of the server buffers the stream, and readers get it in bursts.",
        cause=Cause.DELIVERY,
        kind=StallKind.DECODE,
        load=_FEW,
        faults=(Fault(FaultKind.BUFFERING, 0.0, value=8192.0),),
    ),
    Scenario(
        name="spec-decode",
        sentence="Speculative decoding gives several tokens a step, and nothing is wrong.",
        load=_FEW,
        engine=EngineConfig(num_speculative_tokens=3, acceptance=0.7),
    ),
    Scenario(
        name="stream-interval",
        sentence="The server sends ten tokens at a time by configuration, and nothing is wrong.",
        load=_FEW,
        server=ServerConfig(stream_interval=10),
    ),
    Scenario(
        name="dp-rank-frozen",
        sentence="One of two data-parallel ranks stands still for forty seconds, the other goes on.",
        duration=100.0,
        cause=Cause.ENGINE_HANG,
        kind=StallKind.DECODE,
        server=ServerConfig(data_parallel_size=2),
        load=Load(
            users=(
                Users(count=2, prompt_tokens=64, output_tokens=400, stagger=3.0, rank=0),
                Users(count=2, prompt_tokens=64, output_tokens=400, stagger=3.0, rank=1),
            )
        ),
        pauses=(Pause(at=30.0, seconds=40.0, cause=Cause.ENGINE_HANG, rank=1, gpu_busy=True),),
    ),
    Scenario(
        name="retry-storm",
        sentence="Clients give up after five seconds and ask again, and their abandoned prompts keep the engine busy.",
        duration=90.0,
        cause=Cause.PREFILL,
        kind=StallKind.DECODE,
        load=_with(
            *poisson(
                0.8,
                Arrival(at=20.0, prompt_tokens=6_000, output_tokens=100, abort_after=5.0, retries=4),
                until=40.0,
                seed=3,
            )
        ),
    ),
    # jundot/omlx#2689, ROCm/legacy-rocm-build#6347: about 50 ms more for every step, with no signature anywhere.
    Scenario(
        name="latch",
        sentence="From one moment on every step takes fifty milliseconds more, whatever the load: slower, not a stall.",
        duration=90.0,
        load=_FEW,
        slowdowns=(Slowdown(start=45.0, extra=0.05, cause=Cause.UNKNOWN),),
    ),
    Scenario(
        name="idle",
        sentence="Nobody asks anything.",
    ),
    Scenario(
        name="prefill-only",
        sentence="Prompts of 12,000 tokens with one token of answer: much prefill, and nobody reads.",
        load=Load(every(8.0, Arrival(at=3.0, prompt_tokens=12_000, output_tokens=1), times=7)),
        probe_causes=frozenset({Cause.PREFILL}),
    ),
    Scenario(
        name="whole-prompt-repeats",
        sentence="The same whole prompt is asked again and again, and only its last block is computed.",
        load=Load(
            every(2.0, Arrival(at=0.0, prompt_tokens=2_000, output_tokens=20, identity=5), times=28),
            (Users(count=3, prompt_tokens=64, output_tokens=400, stagger=3.0, start=3.0),),
        ),
    ),
    Scenario(
        name="abort-in-prefill",
        sentence="The client of a very long prompt gives up half way through its prefill.",
        cause=Cause.PREFILL,
        kind=StallKind.DECODE,
        load=_with(Arrival(at=20.0, prompt_tokens=60_000, output_tokens=100, abort_after=14.0)),
    ),
    # ddalcu/mlx-serve#205: without chunking a prompt of 52,900 tokens is one step, and one freeze.
    Scenario(
        name="first-step-open",
        sentence="Without chunked prefill a prompt of 52,900 tokens is one enormous step.",
        duration=80.0,
        cause=Cause.PREFILL,
        kind=StallKind.DECODE,
        engine=EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=131_072),
        load=_with(Arrival(at=25.0, prompt_tokens=52_900, output_tokens=60)),
    ),
    # sgl-project/sglang#31395: fragmented prefills hold decode for 200-320 ms at a time, again and again.
    Scenario(
        name="degraded",
        sentence="Five hundred prompt tokens ride along in every step: no freeze, only gaps of a quarter second.",
        cause=Cause.PREFILL,
        kind=StallKind.DEGRADED,
        load=_with(*every(0.25, Arrival(at=20.0, prompt_tokens=500, output_tokens=2), times=80)),
    ),
    # vllm-project/vllm#53333: a decode worker whose prompts arrive as KV blocks, not as work.
    Scenario(
        name="pd-decode-worker",
        sentence="Prompts are computed elsewhere and arrive as KV blocks, and nothing is wrong.",
        server=ServerConfig(kv_connector=True),
        load=Load(
            users=(
                Users(
                    count=6,
                    prompt_tokens=4_000,
                    output_tokens=300,
                    stagger=1.5,
                    external_tokens=3_999,
                    transfer_seconds=0.08,
                ),
            )
        ),
    ),
    Scenario(
        name="asleep",
        sentence="The engine is put to sleep for half a minute while nobody asks, and woken again.",
        server=ServerConfig(dev_mode=True),
        load=Load(
            users=(
                Users(count=3, prompt_tokens=64, output_tokens=150, stagger=1.0, end=10.0),
                Users(count=3, prompt_tokens=64, output_tokens=150, stagger=1.0, start=48.0),
            )
        ),
        sleeps=(Sleep(17.0, 46.0),),
    ),
    Scenario(
        name="metrics-down",
        sentence="The metrics page is unavailable for twenty seconds while readers are fine.",
        load=_FEW,
        faults=(Fault(FaultKind.METRICS_DOWN, 20.0, 40.0),),
    ),
    Scenario(
        name="metrics-slow",
        sentence="The metrics page takes half a second to answer for a while, and readers are fine.",
        load=_FEW,
        faults=(Fault(FaultKind.METRICS_SLOW, 20.0, 40.0, value=0.5),),
    ),
    # llm-d/llm-d-benchmark#261: the client is late itself, and everything it measures is.
    Scenario(
        name="observer-late",
        sentence="The observer's own loop stands still for three seconds; readers are fine.",
        cause=Cause.OBSERVER,
        load=_FEW,
        observer_lag=(Lag(25.0, 3.0), Lag(40.0, 1.0)),
    ),
    # blazux/qwen3.8-Flash-DGX#9: page-cache misses make a gather take 35 times as long, and the GPU waits for it.
    Scenario(
        name="host-paging",
        sentence="The host reads model pages from disk in every step, and the GPU waits for it.",
        duration=80.0,
        cause=Cause.HOST_PRESSURE,
        kind=StallKind.DECODE,
        load=_FEW,
        slowdowns=(Slowdown(start=30.0, end=60.0, extra=0.9, cause=Cause.HOST_PRESSURE),),
    ),
    # MiaAI-Lab's pairs of machines over RoCE, vllm-project/vllm#2734: a collective waits for a congested link.
    Scenario(
        name="interconnect-congested",
        sentence="The link between two hosts is congested, and every step waits for it.",
        duration=80.0,
        cause=Cause.INTERCONNECT,
        kind=StallKind.DECODE,
        load=_FEW,
        slowdowns=(Slowdown(start=30.0, end=55.0, extra=0.7, cause=Cause.INTERCONNECT),),
    ),
    Scenario(
        name="process-frozen",
        sentence="The whole server process is stopped for twelve seconds: it accepts connections and answers nothing.",
        duration=80.0,
        cause=Cause.ENGINE_HANG,
        kind=StallKind.DECODE,
        load=_FEW,
        faults=(Fault(FaultKind.FROZEN, 30.0, 42.0),),
    ),
    # vllm-project/vllm#11188, noonghunna/club-3090#1052: acceptance decays until a restart; nothing else shows.
    Scenario(
        name="acceptance-collapse",
        sentence="Drafts stop being accepted: a reader gets one token a step instead of three, and nobody stalls.",
        duration=90.0,
        load=_FEW,
        engine=EngineConfig(num_speculative_tokens=3, acceptance=0.85, acceptance_changes=((45.0, 0.04),)),
    ),
    # vllm-project/vllm-metal#479, vllm-project/vllm#45387: nothing runs, everybody waits, and the cache is empty.
    Scenario(
        name="admission-livelock",
        sentence="Nobody is let in although nothing runs and the KV cache is empty.",
        duration=90.0,
        cause=Cause.ADMISSION,
        kind=StallKind.ADMISSION,
        load=Load(users=(Users(count=6, prompt_tokens=64, output_tokens=300, stagger=1.0),)),
        engine=EngineConfig(admission_closed=((20.0, 75.0),)),
    ),
    Scenario(
        name="long-prefill-at-lower-clock",
        sentence="A long prompt is computed while the clock is a third lower: two causes, the prompt the greater one.",
        duration=100.0,
        cause=Cause.PREFILL,
        kind=StallKind.DECODE,
        load=Load(
            (Arrival(at=25.0, prompt_tokens=45_000, output_tokens=100),),
            (Users(count=3, prompt_tokens=64, output_tokens=1_600, stagger=1.0),),
        ),
        slowdowns=(Slowdown(start=20.0, end=80.0, factor=1.5, cause=Cause.GPU_CLOCK),),
    ),
    Scenario(
        name="large-batch",
        sentence="Sixty readers share the engine, and each of them is slower than alone, as it must be.",
        duration=80.0,
        load=Load(users=(Users(count=60, prompt_tokens=64, output_tokens=400, stagger=0.7),)),
    ),
)

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _ALL}


def reference_markdown() -> str:
    """The table of all scenarios, for the documentation."""
    lines = ["| scenario | what happens | seconds | true cause | kind of stall |", "|---|---|---:|---|---|"]
    for name, scenario in SCENARIOS.items():
        lines.append(
            f"| `{name}` | {scenario.sentence} | {scenario.duration:.0f} | {scenario.cause} | {scenario.kind} |"
        )
    return "\n".join(lines)
