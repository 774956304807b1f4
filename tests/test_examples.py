"""The input of the first example."""

import csv
import unicodedata
from pathlib import Path

from daskinfer.storage import Intervals, open_source

COUNTRIES = Path(__file__).parents[1] / "examples" / "countries.csv"


def rows() -> list[dict[str, str]]:
    with COUNTRIES.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_there_are_249_countries_with_unique_codes() -> None:
    found = rows()
    assert len(found) == 249
    assert list(found[0]) == ["alpha2", "alpha3", "numeric", "country"]
    for column in found[0]:
        assert len({row[column] for row in found}) == 249, column


def test_the_codes_are_well_formed() -> None:
    for row in rows():
        assert len(row["alpha2"]) == 2
        assert len(row["alpha3"]) == 3
        assert (row["alpha2"] + row["alpha3"]).isascii()
        assert (row["alpha2"] + row["alpha3"]).isupper()
        assert len(row["numeric"]) == 3
        assert row["numeric"].isdigit()
        assert row["country"] == row["country"].strip() != ""


def test_they_are_sorted_by_name_whatever_the_accents() -> None:
    def plain(name: str) -> str:
        return "".join(c for c in unicodedata.normalize("NFKD", name.casefold()) if not unicodedata.combining(c))

    names = [plain(row["country"]) for row in rows()]
    assert names == sorted(names)


def test_reading_them_keeps_every_character() -> None:
    (block,) = open_source(str(COUNTRIES)).blocks(("alpha2", "numeric", "country"), (), skip=Intervals(), rows=1_000)
    assert block.bad == {}
    found = dict(
        zip(block.values["alpha2"], zip(block.values["numeric"], block.values["country"], strict=True), strict=True)
    )
    assert found["NA"] == ("516", "Namibia")
    assert found["AX"] == ("248", "Åland Islands")
    assert found["CI"] == ("384", "Côte d'Ivoire")
    assert found["BQ"] == ("535", "Bonaire, Sint Eustatius and Saba")
    assert found["AF"] == ("004", "Afghanistan")
