"""The simulator's scheduler beside vLLM's own class, without a server: many small cases in every mode.

Also asynchronous scheduling, which is the simulator's default and which no vLLM on a CPU offers.
"""

import json
import subprocess
from array import array
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from stallwatch.simulator.config import EngineConfig, Policy
from stallwatch.simulator.engine import Engine
from stallwatch.simulator.request import Request
from stallwatch.simulator.step import Outcome
from tests.vllm.environment import HERE, Environment
from tests.vllm.server import VARIABLES, _inherited_variables

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

CASES = 400
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """Settings, and what happens while which step is computed."""

    config: EngineConfig
    events: list[dict[str, Any]]

    def told(self) -> dict[str, Any]:
        """For the other process."""
        config = self.config
        return {
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_model_len": config.max_model_len,
            "long_prefill_token_threshold": config.long_prefill_token_threshold,
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "scheduler_reserve_full_isl": config.scheduler_reserve_full_isl,
            "enable_prefix_caching": config.enable_prefix_caching,
            "block_size": config.block_size,
            "num_gpu_blocks": config.num_gpu_blocks,
            "async_scheduling": config.async_scheduling,
            "model_runner_v2": config.model_runner_v2,
            "policy": str(config.policy),
            "events": self.events,
        }


def made_up(seed: int) -> Case:
    """A case by its number: modes in turn, small pools and budgets, prompts that share their beginnings."""
    random = Random(seed)
    budget = random.choice([16, 40, 128])
    config = EngineConfig(
        max_num_seqs=random.choice([2, 4, 8]),
        max_num_batched_tokens=budget,
        max_model_len=120,
        enable_chunked_prefill=budget < 120 or random.random() < 0.6,
        scheduler_reserve_full_isl=random.random() < 0.7,
        long_prefill_token_threshold=random.choice([0, 0, 7]),
        enable_prefix_caching=seed % 4 != 3,
        block_size=4,
        num_gpu_blocks=random.choice([31, 31, 40, 60, 200]),
        async_scheduling=seed % 2 == 0,
        model_runner_v2=random.random() < 0.5,
        policy=random.choice([Policy.FCFS, Policy.FCFS, Policy.PRIORITY]),
    )
    events: list[dict[str, Any]] = []
    for number in range(random.randint(1, 9)):
        during = random.randint(0, 40)
        shared = Random(random.randint(0, 2))
        prompt = [shared.randrange(256) for _ in range(random.randint(1, 90))]
        events.append(
            {
                "during": during,
                "name": f"r{number}",
                "prompt": prompt,
                "tokens": random.randint(1, 30),
                "priority": random.randint(0, 1),
            }
        )
        if random.random() < 0.3:
            events.append({"during": during + random.randint(0, 15), "leave": f"r{number}"})
    events.sort(key=lambda event: event["during"])
    return Case(config, [{**event, "order": order} for order, event in enumerate(events)])


def simulate(case: Case) -> list[Row]:
    """The same events in the simulator's engine."""
    engine = Engine(case.config)
    requests: dict[str, Request] = {}
    events = list(case.events)
    rows: list[Row] = []
    counted = {"queries": 0, "hits": 0}

    def happen(event: dict[str, Any], now: float) -> None:
        if "leave" in event:
            engine.abort(requests[event["leave"]])
            return
        prompt = array("H", event["prompt"])
        request = Request(event["name"], prompt, event["tokens"], priority=event["priority"])
        requests[request.id] = request
        engine.add(request, now)
        request.arrival = float(event["order"])

    now = 0.0
    while True:
        end = engine.begin(now)
        if end is None:
            if not events:
                return rows
            happen(events.pop(0), now)
            continue
        while engine.executing and not engine.executing.empty and events and events[0]["during"] <= len(rows):
            happen(events.pop(0), now)
        now = end
        outcome = engine.finish()
        counted["queries"] += outcome.stats.queries
        counted["hits"] += outcome.stats.hits
        if not outcome.step.empty:
            rows.append({**_row(outcome), **counted})


def _row(outcome: Outcome) -> Row:
    step = outcome.step
    told = step.told_prefill_tokens
    return {
        "prefill_requests": step.told_prefill_requests,
        "prefill_tokens": told,
        "decode_tokens": step.prefill_tokens + step.decode_tokens - told,
        "outputs": [[o.request.id, o.count, o.finish_reason is not None] for o in outcome.outputs],
        "running": step.running,
        "waiting": step.waiting,
        "deferred": step.deferred,
        "blocks": step.kv_used_blocks,
    }


def test_every_step_of_every_case_is_the_same(vllm_environment: Environment) -> None:
    """Tokens, outputs in their order, queues, blocks and cache hits of each step, in both modes and policies."""
    cases = [made_up(seed) for seed in range(CASES)]
    ran = subprocess.run(
        [str(vllm_environment.python), str(HERE / "real_scheduler.py"), str(vllm_environment.model("tiny"))],
        input=json.dumps([case.told() for case in cases]),
        check=False,
        capture_output=True,
        text=True,
        env={**_inherited_variables(), **VARIABLES, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert ran.returncode == 0, ran.stderr[-3_000:]
    real = json.loads(ran.stdout.splitlines()[-1])
    different = []
    for seed, (case, expected) in enumerate(zip(cases, real, strict=True)):
        actual = simulate(case)
        if actual != expected:
            at = next((i for i, rows in enumerate(zip(actual, expected, strict=False)) if rows[0] != rows[1]), -1)
            different.append((seed, at, case.config.async_scheduling, actual[at], expected[at]))
    steps = sum(map(len, real))
    happened = Counter(what for case, rows in zip(cases, real, strict=True) for what in _happened(case, rows))
    print(f"{CASES} cases, {steps} steps, {len(different)} cases differ; cases with {dict(happened)}")

    assert different[:3] == []
    assert min(happened.values()) >= CASES / 40


def _happened(case: Case, rows: list[Row]) -> set[str]:
    """What makes a case worth looking at."""
    prompts = sum(len(event["prompt"]) for event in case.events if "prompt" in event)
    computed = sum(row["prefill_tokens"] + row["decode_tokens"] for row in rows)
    said = sum(tokens for row in rows for _, tokens, _ in row["outputs"])
    return {
        *(["async"] if case.config.async_scheduling else ["sync"]),
        *(["hits"] if rows and rows[-1]["hits"] else []),
        *(["queues"] if any(row["waiting"] for row in rows) else []),
        *(["recomputation"] if computed > prompts + said else []),
        *(["aborts"] if any("leave" in event for event in case.events) else []),
    }
