"""The peers' side of a comparison, run by the peers' interpreter: ``peer_script.py CPU,CPU…``.

Answers the same requests as ``benchmarks.ours``, with transformers or a kvpress press, and imports
nothing of ours. The decode loop is bare greedy argmax, which is faster than ``model.generate``; ``serve``
is transformers' own continuous batching.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, GenerationConfig


def press_of(name: str) -> Any:
    """None for ``full``; 75 % dropped, with our window of 32 and kernel of 5, for the others."""
    if name == "full":
        return None
    from kvpress import AdaKVPress, SnapKVPress

    # Ada's ratio is that of the press inside.
    snap = SnapKVPress(compression_ratio=0.75, window_size=32, kernel_size=5)
    return {"snapkv": snap, "adakv": AdaKVPress(snap, alpha_safeguard=0.2)}[name]


def without_attention(module: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    """q + k + v instead of attention: what a layer costs around it."""
    return (q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)).transpose(1, 2), None


AttentionInterface.register("without", without_attention)


class Worker:
    """A model, its prefilled cache, and the cache that is being decoded."""

    cache: Any = None
    prefilled: Any = None

    def load(self, folder: str, dtype: str) -> dict[str, Any]:
        kind = getattr(torch, dtype)
        begun = time.perf_counter()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="sdpa")
        self.model.eval()
        loading = {"seconds": time.perf_counter() - begun}
        loading |= {name: value for name, value in self.memory(forget=False).items() if name == "peak_rss"}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        with contextlib.suppress(ImportError):
            from importlib.metadata import version

            import kvpress  # noqa: F401  (patches attention on import: before any measurement)

            versions["kvpress"] = version("kvpress")
        self.model(input_ids=torch.zeros(1, 64, dtype=torch.long))  # pages in the libraries' kernels
        return self.memory(forget=True) | loading | {"versions": versions}

    @torch.inference_mode()
    def prefill(
        self, spec: str, tokens: list[list[int]], new: int, every: int, attention: bool = True
    ) -> dict[str, Any]:
        """Prompt to first token; a cache of transformers needs no room for ``new`` tokens."""
        self.model.set_attn_implementation("sdpa" if attention else "without")
        self.every = every
        self.cache, self.prefilled = None, None  # a second call must not hold two caches
        ids = torch.tensor(tokens)
        press, cache = press_of(spec), DynamicCache()
        begun, spent = time.perf_counter(), time.process_time()
        with contextlib.nullcontext() if press is None else press(self.model):
            logits = self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        first = logits[:, -1].argmax(dim=-1)
        first.tolist()
        seconds, spent = time.perf_counter() - begun, time.process_time() - spent
        self.prefilled = [(layer.keys, layer.values) for layer in cache.layers]
        self.first, self.prompt = first, ids.shape[1]
        self.masked = [getattr(m, "masked_key_indices", None) for m in self.attention()]
        return {"seconds": seconds, "compile_seconds": 0.0, "cpu_seconds": spent} | self.bytes()

    def fill(self, spec: str, tokens: list[list[int]], new: int, every: int) -> dict[str, Any]:
        """The full cache that ``prefill`` leaves, with random keys and values."""
        if spec != "full":
            raise ValueError("only the full cache is filled")
        config, kind = self.model.config, self.model.dtype
        shape = (1, config.num_key_value_heads, len(tokens[0]), config.head_dim)
        self.every, self.cache, self.prompt = every, None, len(tokens[0])
        self.prefilled = [
            (torch.randn(shape, dtype=kind), torch.randn(shape, dtype=kind))
            for _ in range(config.num_hidden_layers)
        ]
        self.first, self.masked = torch.zeros(1, dtype=torch.long), [None] * config.num_hidden_layers
        return self.bytes()

    def attention(self) -> list[Any]:
        """The attention modules, where head-wise presses leave what they masked."""
        return [layer.self_attn for layer in self.model.model.layers]

    @torch.inference_mode()
    def start(self, rows: int) -> dict[str, Any]:
        """Decodes from copies of the first prefilled row."""
        self.cache = DynamicCache()
        for index, (keys, values) in enumerate(self.prefilled):
            self.cache.update(keys[:1].repeat(rows, 1, 1, 1), values[:1].repeat(rows, 1, 1, 1), index)
        for module, masked in zip(self.attention(), self.masked):
            if masked is not None:
                _, heads, slots = (part[masked[0] == 0] for part in masked)
                batch = torch.arange(rows).repeat_interleave(len(heads))
                module.masked_key_indices = (batch, heads.repeat(rows), slots.repeat(rows))
        self.token, self.position = self.first[:1].repeat(rows)[:, None], self.prompt
        return self.bytes()

    @torch.inference_mode()
    def decode(self) -> dict[str, Any]:
        """A few more tokens of every row, timed."""
        begun = time.perf_counter()
        for _ in range(self.every):
            # After a press the cache is shorter than the sequence, so the position must be given.
            at = torch.full_like(self.token, self.position)
            logits = self.model(input_ids=self.token, past_key_values=self.cache, position_ids=at).logits
            self.token = logits[:, -1].argmax(dim=-1, keepdim=True)
            self.position += 1
        self.token.tolist()
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "tokens": self.every * len(self.token), "compile_seconds": 0.0}

    def serve(self, warm: list[list[int]], tokens: list[list[int]], new: int) -> dict[str, Any]:
        """All requests at once through the continuous batching of ``transformers serve``, without its HTTP.

        ``warm`` goes before, so that memory and threads are there.
        """
        how = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        manager = self.model.init_continuous_batching(generation_config=how)
        manager.start()
        try:
            self.answers(manager, warm, new)
            begun, spent = time.perf_counter(), time.process_time()
            results = self.answers(manager, tokens, new)
            seconds, spent = time.perf_counter() - begun, time.process_time() - spent
        finally:
            manager.stop(block=True, timeout=5)
        stamps = [[at - begun for at in result.timestamps] for result in results]
        return {"seconds": seconds, "cpu_seconds": spent, "stamps": stamps}

    def answers(self, manager: Any, tokens: list[list[int]], new: int) -> list[Any]:
        """The results of requests that come together."""
        manager.add_requests(inputs=tokens, max_new_tokens=new, record_timestamps=True)
        results: list[Any] = []
        while len(results) < len(tokens):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the manager ended before its requests did")
            if result is not None and result.is_finished():
                if result.error or len(result.generated_tokens) != new:
                    raise RuntimeError(f"{len(result.generated_tokens)} of {new} tokens: {result.error}")
                results.append(result)
        return results

    def bytes(self) -> dict[str, Any]:
        """Of the current cache; all that is allocated is live."""
        pairs = self.prefilled if self.cache is None else [(x.keys, x.values) for x in self.cache.layers]
        held = sum(x.nbytes for pair in pairs for x in pair)
        return {"live": held, "allocated": held}

    def memory(self, forget: bool) -> dict[str, Any]:
        """Of the process, as in ``benchmarks.machine``."""
        try:
            status = Path("/proc/self/status").read_text()
            names = {"rss": "VmRSS", "peak_rss": "VmHWM"}
            matches = {n: re.search(rf"^{key}:\s*(\d+) kB", status, re.MULTILINE) for n, key in names.items()}
            if forget:
                Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return {}
        return {name: int(match[1]) * 1024 for name, match in matches.items() if match}


def main() -> None:
    """Answer until standard input ends."""
    cpus = [int(cpu) for cpu in sys.argv[1].split(",")]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    torch.set_num_threads(len(cpus))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    worker = Worker()
    names = ("load", "prefill", "fill", "start", "decode", "serve", "bytes", "memory")
    verbs = {name: getattr(worker, name) for name in names}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = verbs[request.pop("do")](**request)
        except Exception as error:  # the other side of the pipe decides what an error means
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print("@ " + json.dumps(answer), file=answers, flush=True)  # ``pallas_kernels.measure.child.MARK``


if __name__ == "__main__":
    main()
