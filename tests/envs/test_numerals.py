from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs.numerals import arabic

DIGITS = "零一二三四五六七八九"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("一百二十", "120"),
        ("三千零五", "3005"),
        ("两万", "20000"),
        ("两百零二人", "202人"),
        ("十一", "11"),
        ("三万二千", "32000"),
        ("十万零五百", "100500"),
        ("一亿零五千", "100005000"),
        ("一千零一夜", "1001夜"),
        ("二〇二〇年", "2020年"),
        ("一〇一中学", "101中学"),
        ("一九八四年", "1984年"),
        ("二〇二〇年五月三日", "2020年5月3日"),
        ("一九九九年十二月三十一日", "1999年12月31日"),
        ("五月三日", "5月3日"),
        ("第三十六计", "第36计"),
    ],
)
def test_written_numbers_become_digits(text: str, expected: str) -> None:
    assert arabic(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("一", "统一", "一起", "十字架", "百年孤独", "千岛湖", "万一", "千万", "百万", "百万富翁", "亿万"),
        *("三四个", "五四运动", "零一万物", "二百五", "一百二", "3万", "三点五", "第二", "二三十", "两两", "二十两"),
        *("一百十二", "一万亿", "五月", "三日", "一九八四", "壹佰", "", "plain 12 text"),
    ],
)
def test_what_is_no_number_beyond_doubt_stays(text: str) -> None:
    assert arabic(text) == text


def spelled(number: int) -> str:
    """An own way to spell: digits with units, then the rules for zeros."""
    sections = [number // 10 ** (4 * i) % 10**4 for i in (2, 1, 0)]
    text = ""
    for section, unit in zip(sections, "亿万 "):
        digits = f"{section:04d}"
        part = "".join(DIGITS[int(d)] + (u.strip() if d != "0" else "") for d, u in zip(digits, "千百十 "))
        text += part.rstrip("零") + unit.strip() if section else "零"
    while "零零" in text:
        text = text.replace("零零", "零")
    text = text.strip("零")
    return text[1:] if text.startswith("一十") else text


@given(st.integers(11, 10**12 - 1))
def test_every_number_is_read_as_it_is_spelled(number: int) -> None:
    assert arabic(f"共{spelled(number)}人") == f"共{number}人"


@given(st.integers(0, 9999))
def test_years_digit_by_digit(year: int) -> None:
    written = "".join("〇一二三四五六七八九"[int(d)] for d in f"{year:04d}")
    assert arabic(f"{written}年") == f"{year:04d}年"


@given(st.text(alphabet="〇零一二两三九十百千万亿年月日号第个点aB1"))
def test_reading_is_idempotent_and_keeps_all_else(text: str) -> None:
    read = arabic(text)
    assert arabic(read) == read
    assert [c for c in read if c in "第个点aB"] == [c for c in text if c in "第个点aB"]
