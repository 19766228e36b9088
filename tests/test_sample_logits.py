"""sample_logits: Philox against its published vectors, the distribution of the draws, what noise depends on, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import (
    DEVICES,
    FLOATS,
    assert_same_bits,
    call,
    check_compiled,
    check_debug_error,
    check_device_errors,
    check_error,
    check_everything,
    check_numerics,
    forced,
    implementations,
    random_tensor,
    to64,
)
from head_cases import INDICES, check_reads_nothing, check_threads
from torch import Tensor

from mtp_kernels.reference._philox import BELOW_ONE, gumbel_noise, philox
from mtp_kernels.reference.sample_logits import sample_logits as reference

OP = "sample_logits"
DRAWS = 24_000
SEED = 20250


def arguments(n: int = 5, m: int = 33, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    logits = random_tensor(n, m, seed=1, dtype=dtype, device=device, scale=2.0)
    temperature = torch.linspace(0.5, 2.0, n, device=device)
    seed = torch.arange(n, device=device) * -(2**40) - 7
    return logits, temperature, seed, torch.arange(n, device=device) * 2**33


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, words: Any) -> None:
    """The vectors published with Random123: in Python integers and in tensors."""
    assert philox(counter, key) == words
    tensors = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(w) for w in tensors) == words


def uniform(seed: int, offset: int, token: int) -> float:
    """The documented u, in Python numbers: 64-bit products, and one rounding to fp32."""
    mask = 0xFFFFFFFF
    a, b, c, d = token & mask, (token >> 32) & mask, offset & mask, (offset >> 32) & mask
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        one, two = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (two >> 32) ^ b ^ k0, two & mask, (one >> 32) ^ d ^ k1, one & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    as_float = torch.tensor(a, dtype=torch.int64).to(torch.float32)
    return min(((as_float + 0.5) * 2.0**-32).item(), 1 - 2.0**-24)


LOWEST, HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
EXTREME = [0, 1, -1, 2**32 - 1, 2**32, -(2**32), 2**62 + 12345, HIGHEST, LOWEST]


def test_noise_is_the_documented_one() -> None:
    seeds, offsets, ids = torch.meshgrid(*[torch.tensor(EXTREME)] * 3, indexing="ij")
    noise = gumbel_noise(seeds, offsets, ids, torch.float32).flatten().double()
    triples = zip(seeds.flatten().tolist(), offsets.flatten().tolist(), ids.flatten().tolist())
    expected = torch.tensor([-math.log(-math.log1p(-uniform(*t))) for t in triples], dtype=torch.float64)
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=1e-6)
    assert len(set(noise.tolist())) == len(EXTREME) ** 3  # each of the six words matters


def test_noise_is_finite_and_gumbel() -> None:
    rounds_to_one = 27392119  # with seed 1 and offset 0 its word is 0xFFFFFFE4, which is 2^32 in fp32
    assert uniform(1, 0, rounds_to_one) == BELOW_ONE
    smallest = gumbel_noise(torch.tensor(1), torch.tensor(0), torch.tensor(rounds_to_one), torch.float32)
    assert abs(smallest.item() + math.log(24 * math.log(2))) < 1e-6
    noise = gumbel_noise(torch.tensor(1), torch.arange(300).unsqueeze(1), torch.arange(1000), torch.float32)
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.01 and abs(noise.var().item() - math.pi**2 / 6) < 0.02


def p_value(drawn: Tensor, probs: Tensor) -> float:
    """Chi-square test of the draws (indices into probs) against the probabilities."""
    expected = probs.double().cpu() * drawn.numel()
    assert expected.min() > 5
    counts = torch.bincount(drawn.cpu(), minlength=probs.numel()).double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((probs.numel() - 1) / 2).double(), statistic / 2).item()


def draw(logits: Tensor, temperature: float, device: str, **by: Tensor) -> Tensor:
    """DRAWS draws from one row of logits, each with its own offset (or as `by` says)."""
    rows = logits.to(device).expand(DRAWS, -1)
    seed = by.get("seed", torch.tensor([SEED])).to(device)
    offset = by.get("offset", torch.arange(DRAWS)).to(device)
    return call(OP, rows, torch.tensor([temperature], device=device), seed, offset, token_ids=by.get("token_ids"))[0]


ROW = torch.tensor([0.3, -1.0, 2.0, 1.2, -0.4, 1.9, 0.0, -0.2, 0.9, 1.5])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0, 3.0, torch.inf])
def test_draws_follow_the_softmax(device: str, implementation: str, temperature: float) -> None:
    """And the test can tell: the same draws fail against a distribution a little warmer, or with one token raised."""
    with forced(implementation):
        drawn = draw(ROW, temperature, device)
    assert p_value(drawn, (ROW / temperature).softmax(-1)) > 1e-3
    if temperature < torch.inf:
        assert p_value(drawn, (ROW / (1.15 * temperature)).softmax(-1)) < 1e-6
    raised = ROW / temperature
    raised[3] += 0.2
    assert p_value(drawn, raised.softmax(-1)) < 1e-6


def test_chi_square_fails_for_a_biased_sampler() -> None:
    """Samplers with the usual faults: noise scaled, the uniform taken for the Gumbel, one noise for two tokens."""
    noise = gumbel_noise(torch.tensor(SEED), torch.arange(DRAWS).unsqueeze(1), torch.arange(10), torch.float32)
    assert p_value((ROW + noise).argmax(-1), ROW.softmax(-1)) > 1e-3
    assert p_value((ROW + 1.15 * noise).argmax(-1), ROW.softmax(-1)) < 1e-6
    assert p_value((ROW + torch.exp(-torch.exp(-noise))).argmax(-1), ROW.softmax(-1).clamp(min=0.001)) < 1e-6
    shared = noise.clone()
    shared[:, 5] = noise[:, 2]
    assert p_value((ROW + shared).argmax(-1), ROW.softmax(-1)) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("way", ["seeds", "high offsets", "high seeds", "other ids"])
def test_every_counter_word_gives_independent_draws(device: str, implementation: str, way: str) -> None:
    """Draws numbered by any of seed, offset and id follow the softmax, and neighbours are independent."""
    many, zero = torch.arange(DRAWS), torch.zeros(1, dtype=torch.int64)
    by: dict[str, dict[str, Tensor]] = {
        "seeds": {"seed": many, "offset": zero},
        "high offsets": {"offset": many * 2**32},
        "high seeds": {"seed": many * 2**32, "offset": zero},
        "other ids": {"offset": zero, "token_ids": (torch.arange(10) + 10 * many.unsqueeze(1)).to(device)},
    }
    with forced(implementation):
        drawn = draw(ROW, 1.5, device, **by[way])
    if way == "other ids":
        drawn = drawn - 10 * many.to(device)
    probs = (ROW / 1.5).softmax(-1)
    assert p_value(drawn, probs) > 1e-3
    assert p_value(drawn[::2] * 10 + drawn[1::2], (probs.unsqueeze(1) * probs).flatten()) > 1e-3


def test_large_noises_do_not_tie() -> None:
    """In a Gemma 4 vocabulary of equal tokens the lowest id would win a tie: with u near 1 in fp32, often."""
    noise = gumbel_noise(torch.tensor([[1], [2]]), torch.tensor(0), torch.arange(262144), torch.float32)
    for row in noise:
        assert len(set(row.topk(200).values.tolist())) == 200


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_many_tokens_are_drawn_evenly(device: str, implementation: str) -> None:
    n = 800
    with forced(implementation):
        drawn, logprobs = call(OP, torch.zeros(n, n, device=device), torch.ones(1, device=device),
                               torch.tensor([SEED], device=device), torch.arange(n, device=device))
    assert p_value(drawn // 100, torch.full((8,), 1 / 8)) > 1e-3
    torch.testing.assert_close(logprobs, torch.full_like(logprobs, -math.log(n)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [0, 1, 6])
def test_logprobs_and_ids_against_fp64(device: str, implementation: str, dtype: torch.dtype, n: int) -> None:
    """The draw is the argmax in fp64 of the documented noise; its logprob that of the softmax at this temperature."""
    logits, temperature, seed, offset = arguments(n, 50, dtype, device)
    with forced(implementation):
        ids, logprobs = call(OP, logits, temperature, seed, offset)
    scaled = logits.double() / temperature.double().unsqueeze(-1)
    for row in range(n):
        us = [uniform(int(seed[row]), int(offset[row]), token) for token in range(50)]
        noisy = scaled[row].cpu() - torch.tensor([-math.log1p(-u) for u in us]).double().log()
        first, second = noisy.topk(2).values.tolist()
        assert ids[row] == noisy.argmax() or first - second < 1e-5
    exact = scaled.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    naive = (logits.float() / temperature.unsqueeze(-1)).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    check_numerics(logprobs, naive, exact, atol=1e-6)
    oracle = reference(*map(to64, (logits, temperature)), seed, offset)
    assert oracle[0].tolist() == ids.tolist() and oracle[1].dtype == torch.float64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("index", INDICES)
def test_place_does_not_matter(device: str, implementation: str, index: torch.dtype) -> None:
    """Columns and rows in another order, alone, or beside others: the same token, and its logprob to fp32 rounding."""
    logits, temperature, seed, offset = arguments(8, 40, device=device)
    generator = torch.Generator().manual_seed(2)
    columns = torch.randperm(40, generator=generator).to(device)
    each = torch.stack([torch.randperm(40, generator=generator) for _ in range(8)]).to(device)
    rows = torch.randperm(8, generator=generator).to(device)
    with forced(implementation):
        ids, logprobs = call(OP, logits, temperature, seed, offset)
        got = [
            call(OP, logits[:, columns], temperature, seed, offset, token_ids=columns.to(index)),
            call(OP, logits.gather(1, each), temperature, seed, offset, token_ids=each.to(index)),
        ]
        moved = call(OP, logits[rows], temperature[rows], seed[rows], offset[rows])
        alone = [call(OP, *(t[r : r + 1] for t in (logits, temperature, seed, offset)))[0] for r in range(8)]
    for other_ids, other_logprobs in got:
        assert other_ids.tolist() == ids.tolist()
        torch.testing.assert_close(other_logprobs, logprobs, rtol=1e-6, atol=1e-6)
    assert moved[0].tolist() == ids[rows].tolist()
    assert torch.cat(alone).tolist() == ids.tolist()
    assert len(set(ids.tolist())) > 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("m", [40, 4096, 5000])
def test_long_rows_and_their_place(device: str, implementation: str, m: int) -> None:
    """Rows of one piece and of several: the reference's draw, and from a kernel the same bits alone or permuted."""
    logits, temperature, seed, offset = arguments(3, m, device=device)
    logits[1, 7], logits[1, m - 2], temperature[2] = torch.nan, -torch.inf, 0.0
    columns = torch.randperm(m, generator=torch.Generator().manual_seed(2)).to(device)
    with forced(implementation):
        ids, logprobs = call(OP, logits, temperature, seed, offset)
        moved = call(OP, logits[:, columns], temperature, seed, offset, token_ids=columns)
        alone = [call(OP, *(t[r : r + 1] for t in (logits, temperature, seed, offset))) for r in range(3)]
    expected = reference(logits, temperature, seed, offset)
    assert ids.tolist() == expected[0].tolist()
    torch.testing.assert_close(logprobs, expected[1], rtol=1e-6, atol=1e-6)
    for other in (moved, tuple(map(torch.cat, zip(*alone)))):
        assert other[0].tolist() == ids.tolist()
        if implementation == "reference":
            torch.testing.assert_close(other[1], logprobs, rtol=1e-6, atol=1e-6)
        else:
            assert_same_bits(other[1], logprobs)


@pytest.mark.kernels_only
@pytest.mark.parametrize("implementation", [i for i in implementations(OP) if i != "triton"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_threads_change_no_bits(implementation: str, dtype: torch.dtype) -> None:
    check_threads(OP, implementation, *arguments(3, 50_001, dtype))


@pytest.mark.kernels_only
@pytest.mark.parametrize("implementation", [i for i in implementations(OP) if i != "triton"])
def test_noise_of_a_whole_vocabulary(implementation: str) -> None:
    """Equal logits, so the noise alone decides: the reference's tokens, of all words of the counter and the key."""
    seeds = torch.tensor(EXTREME)
    args = (torch.zeros(1, 2**17).expand(len(EXTREME), -1), torch.ones(1), seeds, seeds.flip(0))
    with forced(implementation):
        ids, _ = call(OP, *args)
    assert ids.tolist() == reference(*args)[0].tolist() and len(set(ids.tolist())) == len(EXTREME)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_one_seed_for_all_rows(device: str, implementation: str) -> None:
    """[1] means the same for every row: equal rows with one seed and one offset draw the same token."""
    logits = ROW.to(device).expand(6, -1)
    one, seed, offset = (torch.tensor([v], device=device) for v in (1.0, 3, 4))
    with forced(implementation):
        ids, logprobs = call(OP, logits, one, seed, offset)
        full = call(OP, logits, one.expand(6).contiguous(), seed.repeat(6), offset.repeat(6))
    assert len(set(ids.tolist())) == 1
    assert_same_bits(ids, full[0])
    assert_same_bits(logprobs, full[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("temperature", [0.0, -0.0, -1.0, -torch.inf, torch.nan])
def test_greedy(device: str, implementation: str, temperature: float) -> None:
    """argmax with the lowest id on a tie (not the first column), and the logprob at temperature 1."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0], [-5.0, -6.0, 1e30, 2e30]], device=device)
    token_ids = torch.tensor([4, 9, 2, 7], device=device)
    with forced(implementation):
        ids, logprobs = call(OP, logits, torch.full((3,), temperature, device=device), torch.tensor([1], device=device),
                             torch.arange(3, device=device), token_ids=token_ids)
    assert ids.tolist() == [7, 2, 7]
    torch.testing.assert_close(logprobs.cpu(), logits.cpu().log_softmax(-1)[[0, 1, 2], [3, 2, 3]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45, 1e-6])
def test_a_tiny_temperature_is_greedy(device: str, implementation: str, temperature: float) -> None:
    logits, _, seed, offset = arguments(device=device)
    with forced(implementation):
        ids, logprobs = call(OP, 1000 * logits, torch.tensor([temperature], device=device), seed, offset)
    assert ids.tolist() == logits.argmax(-1).tolist() and logprobs.tolist() == [0.0] * 5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0, 1e30, torch.inf])
def test_nan_and_infinity(device: str, implementation: str, temperature: float) -> None:
    nan, inf, n = torch.nan, torch.inf, 400
    warm = temperature > 0
    rows = {
        "nan": ([nan, 0.0, nan, 0.0], {1, 3} if warm else {1}, -math.log(2)),
        "forbidden": ([-inf, 0.0, nan, -inf], {1}, 0.0),
        "nothing": ([nan, -inf, nan, -inf], {0}, -inf),
        "certain": ([0.0, inf, 5.0, nan], {1}, 0.0),
        "two certain": ([inf, 0.0, inf, -inf], {0, 2} if warm else {0}, -math.log(2)),
    }
    for name, (row, allowed, logprob) in rows.items():
        with forced(implementation):
            ids, logprobs = call(OP, torch.tensor(row, device=device).repeat(n, 1),
                                 torch.tensor([temperature], device=device), torch.tensor([5], device=device),
                                 torch.arange(n, device=device))
        assert set(ids.tolist()) == allowed, name
        torch.testing.assert_close(logprobs.cpu(), torch.full((n,), logprob), msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_wild_ids(device: str, implementation: str) -> None:
    """Any int64 is an id: it is hashed and given back, never looked up."""
    ids = torch.tensor(EXTREME, device=device)
    with forced(implementation):
        drawn, _ = call(OP, torch.zeros(300, len(EXTREME), device=device), torch.ones(1, device=device),
                        torch.tensor([1], device=device), torch.arange(300, device=device), token_ids=ids)
        nothing = call(OP, torch.full((1, len(EXTREME)), torch.nan, device=device), torch.ones(1, device=device),
                       torch.tensor([1], device=device), torch.tensor([0], device=device), token_ids=ids)
    assert set(drawn.tolist()) == set(EXTREME)
    assert nothing[0].item() == LOWEST and nothing[1].item() == -torch.inf


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_contract(device: str, dtype: torch.dtype, n: int) -> None:
    check_everything(OP, *arguments(n, dtype=dtype, device=device))
    check_reads_nothing(OP, *arguments(n, dtype=dtype, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("shape", [(33,), (5, 33)])
def test_contract_of_ids(device: str, index: torch.dtype, shape: tuple[int, ...]) -> None:
    logits, temperature, seed, offset = arguments(device=device)
    ids = torch.arange(math.prod(shape), device=device).view(shape).to(index)
    check_everything(OP, logits, temperature[:1], seed[:1], offset, token_ids=ids)
    check_reads_nothing(OP, logits, temperature[:1], seed[:1], offset, token_ids=ids)


def test_compiled_and_devices() -> None:
    check_compiled(OP, *arguments(), token_ids=torch.arange(33))
    check_device_errors(OP, *arguments(), token_ids=torch.arange(33))


def test_errors() -> None:
    logits, temperature, seed, offset = arguments()

    def error(message: str, x: Tensor = logits, t: Tensor = temperature, s: Tensor = seed, o: Tensor = offset,
              **options: Any) -> None:
        check_error(OP, f"sample_logits: {message}", x, t, s, o, **options)

    error("logits: expected 2 dimensions, got 1 ([33])", x=logits[0])
    error("logits: expected bfloat16 or float16 or float32, got float64", x=logits.double())
    error("logits: expected at least 1 column, got 0", x=logits[:, :0])
    error("logits: expected a contiguous last dimension, got strides [1, 5]", x=torch.empty(33, 5).t())
    error("temperature: expected [5] or [1], got [4] (logits has 5 rows)", t=temperature[:4])
    error("temperature: expected [5] or [1], got [5, 1] (logits has 5 rows)", t=temperature.unsqueeze(1))
    error("temperature: expected float32, got float16", t=temperature.half())
    error("seed: expected [5] or [1], got [6] (logits has 5 rows)", s=torch.arange(6))
    error("seed: expected int64, got int32", s=seed.int())
    error("offset: expected [5] or [1], got [] (logits has 5 rows)", o=torch.tensor(1))
    error("offset: expected int64, got float32", o=offset.float())
    error("token_ids: expected [33] or [5, 33], got [5] (logits is [5, 33])", token_ids=torch.arange(5))
    error("token_ids: expected int32 or int64, got float32", token_ids=torch.zeros(33))


def test_debug_names_the_first_offender() -> None:
    logits, temperature, seed, offset = arguments()
    check_debug_error(OP, "sample_logits: token_ids[3]: expected a token id of at least 0, got -1", logits, temperature,
                      seed, offset, token_ids=torch.arange(33).masked_fill(torch.arange(33) == 3, -1))
    temperature[2] = torch.nan
    check_debug_error(OP, "sample_logits: temperature[2]: expected a number, got nan", logits, temperature, seed,
                      offset)
    logits[1, 3], logits[1, 4] = -torch.inf, torch.inf
    check_debug_error(OP, "sample_logits: logits[1, 4]: expected a finite value or -inf, got inf", logits, temperature,
                      seed, offset)
