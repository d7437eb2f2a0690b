"""Chinese worlds: names, words and sentences of each style, as data for the same generator."""

from __future__ import annotations

from dataclasses import replace

from turntree.envs.worlds.names import NameInventory
from turntree.envs.worlds.schema import SHARES
from turntree.envs.worlds.speech import Speech
from turntree.envs.worlds.styles import Frames, Style, StyleName, Templates

__all__ = ["CHINESE", "CHINESE_STYLES"]


def _sounds(text: str) -> dict[str, str]:
    return {pair[0]: pair[1:] for pair in text.split()}


# Characters that foreign names are transcribed with, and how they sound. Starts, middles and ends share none, so a name
# splits into words in one way, and none stands in the texts of the short styles.
_STARTS = _sounds(
    "巴ba 达da 法fa 加ga 卡ka 拉la 马ma 纳na 帕pa 萨sa 塔ta 瓦va 扎za 克ke 莱lai 内ne 雷lei 特te 维wei 索suo"
)
_MIDDLES = _sounds("尔er 恩en 斯si 德de 姆mu")
_ENDS = _sounds("比bi 迪di 吉ji 基qi 利li 米mi 尼ni 皮pi 里ri 西xi 波bo 科ko 洛lo 莫mo 罗ro 布bu 杜du 库ku 卢lu 努nu")
_ROMAN = _STARTS | _MIDDLES | _ENDS

_SHORT_NAMES = NameInventory(tuple(_STARTS), ("",), tuple(_ENDS), _ROMAN)
_LONG_NAMES = NameInventory(tuple(_STARTS), ("", *_MIDDLES), tuple(_ENDS), _ROMAN)

# (relation of the schema, its word, a sentence, the paraphrase of test questions)
_RELATIONS = (
    ("mentor", "导师", "{s}师从{r}{o}。", "指导过{x}的人"),
    ("hometown", "故乡", "{s}在{r}{o}长大。", "{x}从小生活的城市"),
    ("employer", "雇主", "{s}为{r}{o}工作。", "雇用{x}的公司"),
    ("college", "母校", "{s}毕业于{r}{o}。", "{x}就读过的学校"),
    ("mayor", "市长", "{s}选举{o}为{r}。", "被选出来管理{x}的人"),
    ("nation", "所属国", "{s}位于{r}{o}境内。", "{x}所在的国家"),
    ("twin", "友好城市", "{s}与{r}{o}结好。", "与{x}结为姐妹城的城市"),
    ("ruler", "元首", "{s}由{r}{o}统治。", "统治{x}的人"),
    ("capital", "首都", "{s}以{o}为{r}。", "{x}的政府所在的城市"),
    ("ally", "盟国", "{s}与{r}{o}结盟。", "与{x}结盟的国家"),
    ("founder", "创始人", "{s}由{r}{o}一手建立。", "创办{x}的人"),
    ("base", "总部", "{s}的办公楼都在{r}{o}。", "{x}设立主要办公地点的城市"),
    ("owner", "母公司", "{s}归{r}{o}所有。", "拥有{x}的公司"),
    ("director", "导演", "{s}由{r}{o}拍摄。", "执导{x}的人"),
    ("star", "主演", "{s}请来{o}担任{r}。", "在{x}中领衔出演的人"),
    ("studio", "制片公司", "{s}出自{r}{o}。", "制作{x}的公司"),
    ("author", "作者", "{s}出自{r}{o}之手。", "写下{x}的人"),
    ("publisher", "出版社", "{s}由{r}{o}印行。", "出版{x}的公司"),
    ("setting", "故事发生地", "{s}把{o}选为{r}。", "{x}的情节所在的城市"),
    ("principal", "校长", "{s}由{r}{o}领导。", "管理{x}的人"),
    ("site", "校址", "{s}的{r}就在{o}。", "{x}坐落的城市"),
    ("rival", "竞争学校", "{s}一直把{o}看作{r}。", "与{x}相互竞争的学校"),
    ("coach", "教练", "{s}在{r}{o}手下训练。", "指导{x}训练的人"),
    ("home", "主场", "{s}把{o}当作{r}。", "{x}比赛所在的城市"),
    ("sponsor", "赞助商", "{s}的经费来自{r}{o}。", "资助{x}的公司"),
)

CHINESE = Speech(
    language="zh",
    kinds={
        "person": "人物",
        "city": "城市",
        "company": "公司",
        "film": "电影",
        "book": "图书",
        "school": "学校",
        "team": "球队",
        "country": "国家",
    },
    one={
        "person": "一位人物",
        "city": "一座城市",
        "company": "一家公司",
        "film": "一部电影",
        "book": "一本图书",
        "school": "一所学校",
        "team": "一支球队",
        "country": "一个国家",
    },
    relations={key: word for key, word, _, _ in _RELATIONS},
    years={
        "person": "出生年份",
        "city": "建城年份",
        "company": "成立年份",
        "film": "上映年份",
        "book": "出版年份",
        "school": "建校年份",
        "team": "建队年份",
        "country": "独立年份",
    },
    sentences={key: sentence for key, _, sentence, _ in _RELATIONS},
    paraphrases={key: paraphrase for key, _, _, paraphrase in _RELATIONS},
    of="{x}的{r}",
    query="{x}的{r}",
    named="{k}{x}",
    also="（又名{a}）",
    gap="",
    yes=("是", "是的"),
    no=("否", "不是"),
    lecture_title="{s}讲座",
    lecture="{t}是为纪念{s}而举办的年度活动，最近的几讲谈到了{a}和{b}。",
    units={"difference": ("{n}年",), "age": ("{n}岁",)},
    numerals="〇一二三四五六七八九",
    both="和",
    loosely="{p}是{o}。",
    unknown=("不知道", "未知", "无法确定", "无法回答", "不清楚"),
    counts={1: ("一", "1个", "一个"), 2: ("二", "两", "2个", "两个"), 3: ("三", "3个", "三个")},
    vague={"leader": "首领", "seat": "所在", "partner": "伙伴"},
)
"""How a world speaks Chinese."""

_SHORT_FRAMES: dict[Templates, Frames] = {
    "train": Frames(
        who=("{np}是谁？", "{np}叫什么名字？", "请告诉我{np}是谁。", "你知道{np}叫什么名字吗？"),
        what=("{np}是什么？", "你知道{np}吗？", "请告诉我{np}是什么。", "我想知道{np}。"),
        yes_no=("{a}和{b}的{r}相同吗？", "{a}的{r}也是{b}的{r}吗？"),
        code={
            "difference": ("{a}和{b}相差多少年？", "请告诉我{a}和{b}相差多少年。"),
            "sum": ("{a}和{b}的和是多少？", "请告诉我{a}和{b}的和是多少。"),
            "age": ("{a}在{b}是多少岁？", "请告诉我{a}在{b}是多少岁。"),
        },
    ),
    "test": Frames(
        who=("请告诉我{np}。", "你知道{np}是谁吗？"),
        what=("请告诉我{np}。", "我想知道{np}是什么。"),
        yes_no=("{a}的{r}和{b}的{r}相同吗？",),
        code={
            "difference": ("你知道{a}和{b}相差多少年吗？",),
            "sum": ("我想知道{a}和{b}的和是多少。",),
            "age": ("我想知道{a}在{b}是多少岁。",),
        },
    ),
}

_PROSE_FRAMES: dict[Templates, Frames] = {
    "train": Frames(
        who=("{np}是谁？", "{np}叫什么名字？", "请查出{np}是谁。"),
        what=("{np}是什么？", "{np}叫什么？", "请查出{np}的名称。"),
        yes_no=("{a}和{b}的{r}相同吗？", "{a}的{r}同时也是{b}的{r}吗？"),
        comparison=("{a}与{b}，哪一个的{r}更早？", "在{a}和{b}之中，{r}较早的是哪一个？"),
        both=("{r}是{a}且{q}是{b}的{k}", "以{a}为{r}、以{b}为{q}的{k}"),
        count=("有多少个以{a}为{r}？", "{a}是几个的{r}？"),
        current=("如今{np}叫什么？", "请查出现在的{np}。"),
        as_of=("在{y}年，{np}叫什么？", "请查出{y}年时的{np}。"),
        code={
            "difference": ("{a}和{b}相差多少年？", "从{a}到{b}，两者相隔几年？"),
            "sum": ("{a}与{b}之和是多少？", "把{a}和{b}相加，得多少？"),
            "age": ("在{b}，{a}多少岁？", "到{b}时，{a}的年龄是多少？"),
        },
    ),
    "test": Frames(
        who=("请指出{np}。", "能否说出{np}究竟是哪一位？"),
        what=("请指出{np}。", "人们把{np}称作什么？"),
        yes_no=("{a}是否与{b}有同一个{r}？", "{a}和{b}的{r}是不是一样？"),
        comparison=("比较{a}与{b}：谁的{r}在先？",),
        both=("同时以{a}作{r}、以{b}作{q}的那个{k}",),
        count=("数一数，{r}为{a}的共有多少？",),
        current=("按最新的记录，请指出{np}。",),
        as_of=("按{y}年的记录，请指出{np}。",),
        code={
            "difference": ("{a}与{b}之间隔了多少年？",),
            "sum": ("{a}加上{b}等于多少？",),
            "age": ("到{b}为止，{a}活了多少年？",),
        },
    ),
}

_SHORT = Style(
    inventory=_SHORT_NAMES,
    names=dict.fromkeys(SHARES, "{f}{s}"),
    aliases={kind: f"{CHINESE.kinds[kind]}{{f}}{{s}}" for kind in SHARES},
    shared_names=0.0,
    fact="{s}的{r}是{o}。",
    former="{s}以前的{r}是{o}。",
    mention="{s}常和{o}一起出现。",
    frames={split: replace(frames, code={}) for split, frames in _SHORT_FRAMES.items()},
    prose=False,
    speech=CHINESE,
)

CHINESE_STYLES: dict[StyleName, Style] = {
    "short": _SHORT,
    "dated": replace(_SHORT, year="{s}的{r}是{o}。", frames=_SHORT_FRAMES),
    "prose": Style(
        inventory=_LONG_NAMES,
        names={
            "person": "{f}·{s}",
            "city": "{f}{s}市",
            "company": "{f}{s}集团",
            "film": "《{f}{s}往事》",
            "book": "《致{f}·{s}的信》",
            "school": "{f}{s}学院",
            "team": "{f}{s} FC",
            "country": "{f}{s}共和国",
        },
        aliases={
            "person": "{F} {S}",
            "city": "{F} {S}城",
            "company": "{F} {S} Group",
            "film": "《{f}{s}旧事》",
            "book": "《{f}·{s}书简》",
            "school": "{f}{s}学堂",
            "team": "{f}{s}足球俱乐部",
            "country": "{f}{s}国",
        },
        shared_names=0.05,
        opening="{s}{also}是{k}。",
        fact="{s}的{r}是{o}。",
        former="以前的{r}是{o}。",
        mention="常与{o}相提并论。",
        year="{r}：{o}年（{c}年）。",
        inverse="{o}是{s}的{r}。",
        as_of="截至{y}年，{s}的{r}是{o}。",
        frames=_PROSE_FRAMES,
        prose=True,
        speech=CHINESE,
    ),
}
"""Styles of Chinese passages."""
CHINESE_STYLES["articles"] = replace(CHINESE_STYLES["prose"], loose=0.45, sections=3, aside="有关{x}的记述也会提到。")
CHINESE_STYLES["vague"] = replace(_SHORT, shared_names=0.6, vague=True, nothing="找不到{s}的{r}。")
