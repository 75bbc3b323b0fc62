"""The strategies side by side on a GPU: decode and prefill of MoE layers of random weights.

    python benchmarks/gpu_hybrid.py --json gpu_hybrid.json --markdown gpu_hybrid.md

Experts at the geometry of Qwen3-30B-A3B and gpt-oss-20b, but fewer layers, and nothing of a model
but its experts: tok/s are those of the layers' MoE part. Slots for a tenth to all of the experts,
batches of 1 and 8. Ends after --time-limit; what was not reached is listed. Exits with 1 if
anything failed, not if a bar was missed. --dry-run goes the same ways in small, without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import describe, write_json

if TYPE_CHECKING:
    from gpu_decode import Effort
    from gpu_device import Device, ReusedMemory
    from gpu_models import Geometry
    from gpu_parts import PartsEffort

    from freetoken.platforms.gpu import GpuPlatform

SHARES = (0.1, 0.25, 0.5, 1.0)
BATCHES = (1, 8)


class Run:
    """All measurements of one call, and what has been found so far."""

    def __init__(
        self,
        device: Device,
        platform: GpuPlatform,
        *,
        layers: int,
        shares: tuple[float, ...],
        batches: tuple[int, ...],
        effort: Effort,
        parts: PartsEffort,
        time_limit_s: float,
    ) -> None:
        self._device = device
        self._platform = platform
        self._layers = layers
        self._shares = shares
        self._batches = batches
        self._effort = effort
        self._parts = parts
        self._end = time.monotonic() + time_limit_s
        self.figures: dict[str, Any] = {
            "layers": layers,
            "bandwidths": {},
            "kernels": [],
            "fetches": {},
            "cells": [],
            "prefill": [],
            "failures": [],
            "not_reached": [],
            "seconds": {},
        }

    def attempt(self, what: str, work: Callable[[], None]) -> None:
        """Do one piece of work, unless time is up. A failure is noted, and the rest goes on."""
        if time.monotonic() > self._end:
            self.figures["not_reached"].append(what)
            return
        start = time.monotonic()
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.figures["failures"].append(f"{what}: {type(error).__name__}: {error}")
        seconds = time.monotonic() - start
        self.figures["seconds"][what] = round(seconds, 1)
        sys.stderr.write(f"{what}: {seconds:.1f} s\n")
        sys.stderr.flush()

    def bandwidths(self) -> None:
        from gpu_parts import bandwidths

        self.figures["bandwidths"] = bandwidths(self._device, self._platform.cpu_ops, self._parts)

    def model(self, geometry: Geometry) -> None:
        """Everything about one model's experts."""
        from gpu_device import ReusedMemory, runtime_experts
        from gpu_models import make_layers
        from gpu_parts import kernel_speeds, prefill_speed

        from freetoken.moe.runtime import MoeConfig, OffloadMoeRuntime
        from freetoken.moe.strategies import make_strategy

        layers = make_layers(geometry, self._layers)
        memory = ReusedMemory(self._platform)
        experts = runtime_experts(self._platform)
        config = MoeConfig("fused", geometry.top_k)
        cpu_ops = self._platform.cpu_ops
        with OffloadMoeRuntime.create(layers, config, memory, cpu_ops, experts) as fused:
            read_gbps = self.figures["bandwidths"].get("gpu_read_gbps", float("nan"))
            self.attempt(
                f"{geometry.name}: kernels",
                lambda: self.figures["kernels"].extend(
                    kernel_speeds(geometry, fused, layers[0], read_gbps, self._device, self._parts)
                ),
            )
            strategy = make_strategy(fused)
            for layer_id in range(self._layers):
                strategy.register(layer_id, fused.slot_kernel(layer_id))
            self.attempt(
                f"{geometry.name}: prefill, fused",
                lambda: self.figures["prefill"].extend(
                    prefill_speed(geometry, "fused", strategy, fused, self._device, self._parts)
                ),
            )
            for share in self._shares:
                self.attempt(
                    f"{geometry.name}: slots for {share:.0%}",
                    lambda share=share: self._share(geometry, share, layers, memory, fused),
                )
                self._device.release_memory()

    def _share(
        self, geometry: Geometry, share: float, layers: Any, memory: ReusedMemory, fused: Any
    ) -> None:
        """All batches of one number of slots."""
        from gpu_decode import Strategies, measure_cell
        from gpu_device import runtime_experts
        from gpu_models import slots_for
        from gpu_parts import fetch_speeds, prefill_speed

        from freetoken.moe.runtime import MoeConfig, OffloadMoeRuntime

        memory.rewind()
        slots = slots_for(share, geometry)
        config = MoeConfig("hybrid", geometry.top_k, cache_slots=slots)
        experts = runtime_experts(self._platform)
        runtime = OffloadMoeRuntime.create(layers, config, memory, self._platform.cpu_ops, experts)
        with runtime:
            plain = runtime.store.plain_layers
            if plain:
                raise RuntimeError(
                    f"{len(plain)} of {self._layers} layers could not be pinned; expected all of "
                    "them to be: see the limit on locked memory"
                )
            strategies = Strategies(runtime, fused)
            for tokens in self._batches:
                self.attempt(
                    f"{geometry.name}: {slots} slots, batch {tokens}",
                    lambda tokens=tokens: self.figures["cells"].append(
                        {"share": share}
                        | measure_cell(geometry, strategies, tokens, self._device, self._effort)
                    ),
                )
            names = ("hybrid", "cpu") if share == self._shares[0] else ("hybrid",)
            for name in names:
                self.attempt(
                    f"{geometry.name}: prefill, {name}, {slots} slots",
                    lambda name=name: self.figures["prefill"].extend(
                        prefill_speed(
                            geometry,
                            name,
                            strategies.by_name[name],
                            runtime,
                            self._device,
                            self._parts,
                        )
                    ),
                )
            if share == self._shares[-1]:
                self.figures["fetches"][geometry.name] = fetch_speeds(runtime, self._device)


def make_run(args: argparse.Namespace) -> tuple[Run, tuple[Geometry, ...]]:
    """The device and what is to be measured on it."""
    import torch
    from gpu_decode import Effort
    from gpu_device import CudaDevice, DryDevice, handshake_findings
    from gpu_models import DRY_MODELS, MODELS
    from gpu_parts import DRY_PARTS, PartsEffort

    if args.dry_run:
        device: Device = DryDevice()
        effort = Effort(1, 0.0, least_steps=1, most_steps=1, settle=0, trace_steps=2)
        shares, batches, models, parts = (0.5, 1.0), (1,), DRY_MODELS, DRY_PARTS
    else:
        device, effort, parts = CudaDevice(), Effort(), PartsEffort()
        shares, batches, models = SHARES, BATCHES, MODELS
    platform = device.platform(args.threads, "int8")
    run = Run(
        device,
        platform,
        layers=min(2, args.layers) if args.dry_run else args.layers,
        shares=shares,
        batches=batches,
        effort=effort,
        parts=parts,
        time_limit_s=args.time_limit,
    )
    run.figures |= {
        "machine": describe(),
        "gpu": device.name,
        "torch": torch.__version__,
        "cpu_kernels": platform.cpu_ops.description,
        "threads": platform.cpu_ops.threads,
        "handshakes": handshake_findings(platform),
        "handshake_in_graphs": platform.handshake_choice.capturable,
    }
    if not platform.handshake_choice.capturable:
        raise SystemExit(
            "gpu_hybrid.py: no handshake works in graphs here (see the findings of `ft doctor`); "
            "the benchmark compares captured steps and has nothing to measure"
        )
    chosen = [model for model in models if not args.model or args.model in model.name]
    return run, tuple(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8, help="of each model (default: 8)")
    parser.add_argument("--model", help="only models whose name contains this")
    parser.add_argument("--threads", type=int, help="of the CPU's experts")
    parser.add_argument("--time-limit", type=float, default=230, help="seconds (default: 230)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, without a GPU")
    args = parser.parse_args()
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated
    from gpu_report import report

    run, models = make_run(args)
    run.attempt("bandwidths", run.bandwidths)
    for geometry in models:
        run.attempt(geometry.name, lambda geometry=geometry: run.model(geometry))
        write_json(args.json, run.figures)
    text = report(run.figures)
    write_json(args.json, run.figures)
    if args.markdown is not None:
        args.markdown.write_text(text)
    sys.stdout.write(text)
    sys.exit(1 if run.figures["failures"] else 0)


if __name__ == "__main__":
    main()
