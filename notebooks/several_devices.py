# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   accelerator: TPU
#   colab: {gpuType: V5E1}
# ---

# %% [markdown]
# # Several devices
#
# A mesh, what a model needs on devices that are not here, and a compressed context that is saved on one
# device and reopened on two. On a TPU host with several chips it uses them; on a CPU they are virtual.

# %%
# The runtime's jax stays: it is asked for by its version, and pip leaves it alone, or says why it cannot.
KVJAX = ""  # a checkout or a wheel on this machine, such as "/content/kvjax"; "" where kvjax is installed

if KVJAX:
    import subprocess
    import sys
    from importlib.metadata import version

    pip = [sys.executable, "-m", "pip", "install", "--quiet", KVJAX, f"jax=={version('jax')}"]
    subprocess.run(pip, check=True)

# %%
import contextlib

import jax

with contextlib.suppress(RuntimeError):  # on a CPU: two virtual devices, if nothing has used the one there is
    jax.config.update("jax_num_cpu_devices", 2)

from kvjax import doctor

print("\n".join((*doctor.software(), *doctor.devices())))

# %%
import tempfile
from pathlib import Path

import kvjax

count = min(2, len(jax.devices()))
mesh = f"tensor={count}"
one, several = kvjax.load(), kvjax.load(mesh=mesh)
text = one.text

# %% [markdown]
# `load(mesh=...)` shards the weights, and every later call with this model runs on the mesh: `tensor` cuts KV
# heads, `data` rows. Nothing is allocated, evicted or read across devices.

# %%
filler = "The road went on between the trees, and the evening was quiet and cold. " * 10
page = text.encode(filler + "The secret number for apple-river is 48213. " + filler)
question = text.encode(
    "What is the secret number for apple-river? The secret number for apple-river is", bos=False
)
policy = "int8(16) + sinks(4)"
answers = []
for model in (one, several):
    run = kvjax.generate(model, policy, [page + question], max_new_tokens=3)
    answers.append(text.decode(run.tokens[0]))
print(answers[0], "| the same on the mesh:", answers[0] == answers[1])

# %% [markdown]
# A page is read once and saved; the file does not know how many devices made it. Another process, on another
# mesh, goes on from there.

# %%
state, _ = kvjax.prefill(one, policy, [page], context=1024)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "page.kv"
    kvjax.save(state, file, model=one, policy=policy)
    print(f"{file.stat().st_size:,} bytes on disk")
    reopened = kvjax.open(file, model=several)

ends = []
for model, held in ((one, state), (several, reopened.state)):
    _, logits = kvjax.extend(model, policy, held, [question])
    ends.append(int(logits[0].argmax()))
print("next token:", repr(text.decode(ends[:1])), "| the same on the mesh:", ends[0] == ends[1])

# %% [markdown]
# Before devices are rented: what Llama-3.1-8B at 32,768 tokens needs on them, from shapes alone.
# `python -m kvjax.plan` compiles for TPUs and GPUs that are not here, and knows more.

# %%
from kvjax.models import published
from kvjax.plan import sizes

spec, memory = published.spec("llama-3.1-8b"), int(15.75 * 2**30)  # of a TPU v5e
for policy in ("full", "int8(64)"):
    for devices in (1, 2, 4, 8):
        case = sizes.deployment(spec, policy, rows=1, context=32768, dtype="bfloat16", devices=devices)
        needed, rows = sizes.need(case), sizes.most_rows(case, memory)
        print(
            f"{policy:8} {devices} x v5e: {needed.total / 2**30:6.2f} GiB each for a row, {rows:3} rows fit"
        )
