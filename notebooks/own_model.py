# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   accelerator: NONE
# ---

# %% [markdown]
# # Your own Flax model, every policy
#
# A transformer written from nothing in Flax NNX, and what it needs so that kvjax keeps its cache: it calls
# one function, `attend`, where it would compute attention.

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
from kvjax import doctor

print("\n".join((*doctor.software(), *doctor.devices())))

# %% [markdown]
# The model. B rows of T tokens; N query heads and K KV heads of H channels; D is the width, V the vocabulary.

# %%
import jax
import jax.numpy as jnp
from flax import nnx

import kvjax

V, D, N, K, H = 64, 64, 4, 2, 16
as_list = getattr(nnx, "List", list)  # Flax before 0.12 takes a plain list


def rope(x, positions):  # [B, T, heads, H] at positions [B, T]
    half = H // 2
    angle = positions[:, :, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
    )


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(D, rngs=rngs), nnx.RMSNorm(D, rngs=rngs)
        self.q = nnx.LinearGeneral(D, (N, H), use_bias=False, rngs=rngs)
        self.k = nnx.LinearGeneral(D, (K, H), use_bias=False, rngs=rngs)
        self.v = nnx.LinearGeneral(D, (K, H), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((N, H), D, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.up, self.down = nnx.Linear(D, 4 * D, rngs=rngs), nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, x, positions, attend):
        y = self.norm1(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        turned = rope(q, positions), rope(k, positions)
        heads = kvjax.Heads(
            q=turned[0], k=turned[1], v=v, q_pre=q, k_pre=k, hidden=y, rotate=rope, project=self.q
        )
        x = x + self.out(attend(heads))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    num_heads, num_kv_heads, head_dim, max_positions = N, K, H, 4096

    def __init__(self, layers, rngs):
        self.tokens = nnx.Embed(V, D, rngs=rngs)
        self.layers = as_list([Block(rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(D, rngs=rngs)

    def embed(self, tokens, positions):
        return self.tokens(tokens)

    def logits(self, x):
        return self.tokens.attend(self.norm(x))

    def __call__(self, tokens):  # whole rows, for training: plain causal attention
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        dense = lambda heads: jax.nn.dot_product_attention(heads.q, heads.k, heads.v, is_causal=True)  # noqa: E731
        x = self.embed(tokens, positions)
        for layer in self.layers:
            x = layer(x, positions, dense)
        return self.logits(x)


# %% [markdown]
# `attend` gets the heads of T new tokens and gives back what attention mixes of the values. Scores are
# divided by the square root of H. `q_pre` and `k_pre` are before RoPE, `hidden` is the input of the attention
# block, `rotate` and `project` tell policies that look ahead how queries come about.
#
# A little training first, so that there is something to lose: rows repeat themselves after 8 to 32 tokens,
# and the model learns to look up what came next the last time.

# %%
import numpy as np
import optax

module = Transformer(2, nnx.Rngs(0))
optimizer = nnx.Optimizer(module, optax.adamw(3e-3), wrt=nnx.Param)


def rows(rng):
    periods = rng.integers(8, 33, 32)
    return jnp.asarray(np.stack([np.resize(rng.integers(0, V, period), 64) for period in periods]))


@nnx.jit
def train(module, optimizer, tokens):
    def loss(module):
        nll = optax.softmax_cross_entropy_with_integer_labels(module(tokens[:, :-1]), tokens[:, 1:])
        return nll[:, 32:].mean()

    value, gradients = nnx.value_and_grad(loss)(module)
    optimizer.update(module, gradients)
    return value


rng = np.random.default_rng(0)
update = nnx.cached_partial(train, module, optimizer)  # which walks the modules' variables once
for _ in range(500):
    last = update(rows(rng))
print("learned" if last < 0.5 else f"loss {last}")

# %% [markdown]
# `load` takes the module; no array is copied. `check` feeds it in other portions, beside other rows and at
# other positions, and names the first layer that gives another result.

# %%
model = kvjax.load(module)
print(kvjax.check(model))

# %% [markdown]
# Every policy takes it. The last 10 of 40 tokens repeat the first 10, so what follows is known. The window
# has dropped it; SnapKV keeps what the end of the prompt looks at, and that is not all that comes next.

# %%
text = np.random.default_rng(7).permutation(V)[:30].tolist()
prompt, expected = [*text, *text[:10]], text[10:18]
for spec in ("full", "int8(8)", "snapkv(8) + ada(0.5)", "window(8) + sinks(4)"):
    run = kvjax.generate(model, spec, [prompt], max_new_tokens=8)
    right = sum(a == b for a, b in zip(run.tokens[0], expected))
    size = kvjax.nbytes(run.state).total["live"]
    print(f"{spec:22} {'all right' if right == 8 else 'not all right':14} {size:6,} bytes live")

# %% [markdown]
# Inside your own `jit`: `CausalLM` is an `nnx.Module` whose cache is one variable.

# %%
from kvjax.flax import CausalLM

lm = CausalLM(model, "int8(8)", batch=1, context=64)
token = lm.prefill([prompt]).argmax(-1)
lm.reserve(8)


@nnx.jit
def step(lm, token):
    return lm(token).argmax(-1)


written = [int(token[0])]
for _ in range(7):
    token = step(lm, token)
    written.append(int(token[0]))
print(written == expected)
