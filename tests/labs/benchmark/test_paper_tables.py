"""The paper's numbers as data, typed once more from its pages."""

from decimal import Decimal

import pytest

from spec_t5x.labs.benchmark import paper_tables

# Task, draft, temperature, gamma, alpha, c, EXP and EMP.
TABLE_4 = """
    EnDe small 0 7 0.75 0.02 3.2 3.4
    EnDe base 0 7 0.8 0.04 3.3 2.8
    EnDe large 0 7 0.82 0.11 2.5 1.7
    EnDe small 1 7 0.62 0.02 2.3 2.6
    EnDe base 1 5 0.68 0.04 2.4 2.4
    EnDe large 1 3 0.71 0.11 2.0 1.4
    CNN/DM small 0 5 0.65 0.02 2.4 3.1
    CNN/DM base 0 5 0.73 0.04 2.6 3.0
    CNN/DM large 0 3 0.74 0.11 2.0 2.2
    CNN/DM small 1 5 0.53 0.02 1.9 2.3
    CNN/DM base 1 3 0.55 0.04 1.8 2.2
    CNN/DM large 1 3 0.56 0.11 1.6 1.7
"""
# Alphas in the order of the rows, at temperature 0 and then at 1.
TABLE_3 = {
    "GPT-like (97M)": "0.03 0.05 0.88 0.03 0.05 0.89",
    "T5-XXL (EnDe)": "0.08 0.20 0.75 0.80 0.82 0.07 0.19 0.62 0.68 0.71",
    "T5-XXL (CNN/DM)": "0.13 0.23 0.65 0.73 0.74 0.08 0.16 0.53 0.55 0.56",
    "LaMDA (137B)": "0.61 0.71 0.75 0.57 0.71 0.74",
}
# Lenience 1, 0.5, 0.3 and 0.1.
TABLE_5 = {
    "unigram": "0.07 0.1 0.11 0.16",
    "bigram": "0.19 0.23 0.25 0.32",
    "T5-small": "0.62 0.71 0.76 0.84",
    "T5-base": "0.68 0.8 0.83 0.90",
}


def test_tables_2_and_4():
    lines = [line.split() for line in TABLE_4.strip().splitlines()]
    typed = [(task, draft, *map(float, numbers)) for task, draft, *numbers in lines]
    assert [tuple(vars(row).values()) for row in paper_tables.TABLE_2] == typed


def test_table_3():
    for target, alphas in TABLE_3.items():
        rows = [row for row in paper_tables.TABLE_3 if row.target == target]
        assert [row.alpha for row in rows] == [float(alpha) for alpha in alphas.split()]
        assert [row.temperature for row in rows] == sorted([0.0, 1.0] * (len(rows) // 2))


@pytest.mark.parametrize(
    ("cells", "alphas", "speed_ups"),
    [
        (paper_tables.TABLE_5, TABLE_5, "2.5 3.1 3.6 5"),
        (paper_tables.ARGMAX_LENIENCE, {"T5-small": "0.75 0.75 0.8 0.87"}, "3.3 3.3 3.9 4.9"),
    ],
)
def test_alphas_and_factors_of_lenience(cells, alphas, speed_ups):
    for draft, typed in alphas.items():
        found = [cell for cell in cells if cell.draft == draft]
        assert [cell.lenience for cell in found] == [1.0, 0.5, 0.3, 0.1]
        assert [cell.alpha for cell in found] == [float(alpha) for alpha in typed.split()]
        factors = list(map(Decimal, speed_ups.split())) if draft == "T5-small" else [None] * 4
        assert [cell.speed_up for cell in found] == factors
    assert len(cells) == 4 * len(alphas)
