"""The counter-based generator: the same everywhere, and random enough for dropout."""

from __future__ import annotations

import torch

from regard._hash import mix, mix_number, uniform


def test_mix_is_the_same_for_tensors_and_numbers_and_uses_the_low_32_bits():
    numbers = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, -1, -12345]
    mixed = mix(torch.tensor(numbers))
    assert mixed.tolist() == [mix_number(number) for number in numbers]
    assert mix_number(-1) == mix_number(2**32 - 1)
    assert ((mixed >= 0) & (mixed < 2**32)).all()


def test_mix_is_one_to_one():
    words = torch.cat([torch.arange(2**18), torch.arange(2**32 - 2**18, 2**32), torch.arange(0, 2**32, 2**14)]).unique()
    assert mix(words).unique().numel() == words.numel()


def test_one_bit_of_input_flips_half_of_the_output():
    words = torch.arange(1, 4000)
    for bit in range(32):
        changed = mix(words) ^ mix(words ^ (1 << bit))
        flips = sum(((changed >> k) & 1).double().mean() for k in range(32))
        assert 14 < flips < 18


def test_uniform_is_uniform_in_the_half_open_unit_interval():
    drawn = uniform(7, torch.arange(200_000))
    assert drawn.dtype == torch.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = torch.histc(drawn, 50, 0, 1)
    assert ((counts - 4000) ** 2 / 4000).sum() < 100
    assert torch.equal(drawn * 2**24, (drawn * 2**24).round())


def test_neighbouring_draws_and_seeds_are_not_correlated():
    index = torch.arange(100_000)
    one, two = uniform(3, index) - 0.5, uniform(4, index) - 0.5
    for a, b in [(one[:-1], one[1:]), (one, two), (one[:-64], one[64:])]:
        assert abs(float((a * b).mean())) * 12 < 5 / len(a) ** 0.5


def test_an_index_beyond_32_bits_and_every_word_of_the_seed_count():
    index = torch.arange(1000)
    base = uniform(5, index)
    for other in (uniform(5, index + 2**32), uniform(5, index + 2**45), uniform(5 + 2**32, index), uniform(-5, index)):
        assert (other != base).float().mean() > 0.99


def test_a_tensor_seed_draws_what_the_number_draws():
    index = torch.arange(7 * 11).reshape(7, 11)
    for seed in (0, 9, 2**40 + 3, -7):
        assert torch.equal(uniform(torch.tensor(seed), index), uniform(seed, index))


def test_draws_are_the_same_under_vmap_and_compile():
    index = torch.arange(3 * 5).reshape(3, 5)
    wanted = uniform(11, index)
    assert torch.equal(torch.func.vmap(lambda i: uniform(11, i))(index), wanted)
    compiled = torch.compile(lambda s, i: uniform(s, i), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.tensor(11), index), wanted)


def test_the_generator_is_pinned():
    drawn = uniform(2024, torch.tensor([0, 1, 2**33]))
    assert drawn.tolist() == [0.8756675720214844, 0.30164045095443726, 0.8566168546676636]
