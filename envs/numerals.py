"""Chinese numerals as Arabic ones, only where a text beyond doubt writes a number with them.

| text | reading |
|---|---|
| whole numbers of two or more signs with a unit: ``一百二十``, ``三千零五``, ``两万`` | ``120``, ``3005``, ``20000`` |
| digit by digit, with a ``〇``: ``二〇二〇``, ``一〇一`` | ``2020``, ``101`` |
| four digits before ``年``: ``一九八四年`` | ``1984年`` |
| one sign for a month or day of a date: ``二〇二〇年五月三日``, ``五月三日`` | ``2020年5月3日``, ``5月3日`` |
| a single sign: ``一``, ``十``, ``百``, ``万`` (``十字架``, ``百年``, ``统一``) | unchanged |
| digits without a unit: ``三四``, ``五四运动``, ``零一`` | unchanged |
| a unit first: ``千万``, ``百万``, ``万一`` | unchanged |
| loose forms: ``二百五``, ``一百二``, ``3万``, ``三点五``, ``半``, ``第二``'s ``二`` | unchanged |
| financial numerals: ``壹``, ``贰``, ``拾`` | unchanged |
"""

from __future__ import annotations

import re

__all__ = ["arabic"]

_DIGITS = {sign: value for value, sign in enumerate("零一二三四五六七八九")} | {"〇": 0}
_UNITS = {"十": 10, "百": 100, "千": 1000}
_GROUPS = {"万": 10**4, "亿": 10**8}
_MOST = 10**12
_RUN = re.compile("[〇零一二三四五六七八九两十百千万亿]{2,}")
_POSITIONAL = re.compile("[〇一二三四五六七八九]{2,}")
_DAY = re.compile("(?<=月)[一二三四五六七八九十](?=[日号])")
_MONTH = re.compile(r"(?<=年)[一二三四五六七八九十](?=月)|[一二三四五六七八九十](?=月\d{1,2}[日号])")
_TWO = re.compile("两(?=[百千万亿])")


def arabic(text: str) -> str:
    """``text`` with the numbers of the module's table in Arabic numerals."""
    written = _RUN.sub(lambda match: _number(match[0], text[match.end() : match.end() + 1]), text)
    for place in (_DAY, _MONTH):
        written = place.sub(lambda match: str(_value(match[0])), written)
    return written


def _number(run: str, following: str) -> str:
    """The digits of one run of numerals, or the run itself where it is no number beyond doubt."""
    if _POSITIONAL.fullmatch(run) and ("〇" in run or (len(run) == 4 and following == "年")):
        return "".join(str(_DIGITS[sign]) for sign in run)
    plain = _TWO.sub("二", run).replace("〇", "零")
    value = _value(plain)
    # Reading is lenient; what counts is that the number is written as it was read.
    return str(value) if plain[-1] != "两" and value < _MOST and _spelled(value) == plain else run


def _value(run: str) -> int:
    total = section = digit = 0
    for sign in run:
        if sign in _UNITS:
            section, digit = section + (digit or 1) * _UNITS[sign], 0
        elif sign in _GROUPS:
            larger = sign == "亿"  # it counts everything before it, 万 only what stands since the 亿
            counted = section + digit + (total if larger else 0)
            total, section, digit = (0 if larger else total) + counted * _GROUPS[sign], 0, 0
        else:
            digit = _DIGITS.get(sign, 0)
    return total + section + digit


def _spelled(number: int) -> str:
    """The full spelling of a number below 10**12 that needs a unit; empty for 0."""
    written, rest, skipped = "", number, False
    for size, sign in ((10**8, "亿"), (10**4, "万"), (1, "")):
        group, rest = divmod(rest, size)
        if group:
            written += ("零" if written and (skipped or group < 1000) else "") + _spelled_group(group) + sign
        skipped = not group
    return written.removeprefix("一") if written.startswith("一十") else written


def _spelled_group(group: int) -> str:
    written, skipped = "", False
    for size, sign in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit, group = divmod(group, size)
        if digit:
            written += ("零" if written and skipped else "") + "零一二三四五六七八九"[digit] + sign
        skipped = not digit
    return written
