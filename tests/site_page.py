"""The page of shared results in a real browser: `make site-test`, which needs Chromium and its driver."""

import copy
import json
import random
import time
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from llm_train_bench.check.public_site import published_rows, shared_row, site_page
from llm_train_bench.check.verify import verify_file

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "results/h200-sxm/llm-train-bench").glob("*.json"))
HOSTILE = """<img src=x onerror="document.title='taken'">|</script><script>document.title='taken'</script>
|"><b>bold</b>|javascript:alert(1)|'; DROP TABLE--|\u202eevil|{{7*7}}|<!--""".split("|")
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-background-networking --no-first-run
--disable-component-update --disable-sync --window-size=1400,1000""".split()


def rows_of_ours() -> list[dict]:
    return [
        shared_row("ann", path.relative_to(ROOT / "results"), verify_file(path)) for path in FILES
    ]


def many(n: int) -> list[dict]:
    """Rows of invented machines, submitters and versions."""
    chance, ours, rows = random.Random(0), rows_of_ours(), []
    for i in range(n):
        row = copy.copy(chance.choice(ours))
        row |= {"hardware": f"GPU {i % 37}", "submitter": f"s{i % 211}", "file": f"{i}.json",
                "rate": row["rate"] * chance.uniform(0.5, 1.5), "tier": i % 5, "devices": 1 + i % 8,
                "torch": f"2.{11 + i % 5}.0", "date": f"2026-{1 + i % 12:02}-01"}  # fmt: skip
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options)
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, tmp_path):
    """Opens a page of rows; returns a function of the link's end."""

    def opened(rows, published=(), link="") -> webdriver.Chrome:
        path = tmp_path / "index.html"
        path.write_text(site_page(rows, list(published)), encoding="utf-8")
        browser.get("about:blank")
        browser.get(f"{path.as_uri()}{link}")
        return browser

    return opened


def cells(browser, title: str) -> list[str]:
    """The texts of a column of the table of checked results."""
    found = browser.find_elements(By.CSS_SELECTOR, f'main td[data-label="{title}"]')
    return [cell.text for cell in found]


def choose(browser, name: str, value: str) -> None:
    Select(browser.find_element(By.ID, name)).select_by_value(value)


def test_filter_sort_open_and_link(page):
    browser = page(rows_of_ours())
    assert len(cells(browser, "model")) == len(FILES)
    assert cells(browser, "model")[0] == "gpt2-125m"  # the fastest first
    choose(browser, "filter-format", "fp8")
    assert cells(browser, "precision") == ["fp8"] * 2 and "2 of 6" in browser.page_source
    choose(browser, "tier", "3")
    assert cells(browser, "model") == ["llama-8b-proxy"]
    link = browser.execute_script("return location.hash")
    assert "format=fp8" in link and "tier=3" in link
    browser = page(rows_of_ours(), link=link)
    assert cells(browser, "model") == ["llama-8b-proxy"]
    choose(browser, "filter-format", "")
    (sort,) = [
        b for b in browser.find_elements(By.CSS_SELECTOR, "main th button") if b.text == "MFU"
    ]
    sort.click()
    shares = [float(text.rstrip("%")) for text in cells(browser, "MFU")]
    assert shares == sorted(shares, reverse=True) and len(shares) == 4
    assert "sort=mfu" in browser.execute_script("return location.hash")


def test_a_row_opens_to_its_evidence_by_keyboard(page):
    browser = page(rows_of_ours())
    button = browser.find_element(By.CSS_SELECTOR, 'main td[data-label="hardware"] button')
    assert button.get_attribute("aria-expanded") == "false"
    button.send_keys(Keys.ENTER)
    text = browser.find_element(By.CSS_SELECTOR, "td.evidence").text
    for words in ("why not higher", "nobody else has reproduced it", "torch 2.11.0", "driver 580",
                  "train.py configs/gpt2-125m.json", "cudnn", "989.4 TFLOP/s dense BF16"):  # fmt: skip
        assert words in text, words
    assert "open=" in browser.execute_script("return location.hash")


def test_prices_are_the_readers(page):
    browser = page(rows_of_ours())
    before = [float(text) for text in cells(browser, "US$ / M tokens")]
    price = browser.find_element(By.CSS_SELECTOR, "#prices input")
    assert price.get_attribute("value") == "3.75"
    price.clear()
    price.send_keys("7.5")
    after = [float(text) for text in cells(browser, "US$ / M tokens")]
    assert after == pytest.approx([2 * x for x in before], rel=0.05)


def test_the_spread_is_over_submitters(page):
    rows = rows_of_ours()[:1]
    for i, factor in enumerate((0.9, 1.1)):
        rows.append(
            {**rows[0], "submitter": f"b{i}", "rate": rows[0]["rate"] * factor, "file": f"{i}"}
        )
    browser = page(rows)
    assert all(text.startswith("3 submitters: ") for text in cells(browser, "spread"))
    assert len(browser.find_elements(By.CSS_SELECTOR, "#trend circle")) == 3


def test_published_figures_stand_apart(page):
    browser = page(rows_of_ours(), published_rows())
    section = browser.find_element(By.ID, "published").text
    assert (
        "Published by others, not verified" in section and "Nobody here has checked them" in section
    )
    assert len(cells(browser, "model")) == 6
    choose(browser, "filter-hardware", "H100 SXM")
    assert (
        cells(browser, "model") == []
        and "H100 SXM" in browser.find_element(By.ID, "published").text
    )


def test_hostile_names_are_texts(page):
    rows = [{**rows_of_ours()[0], "hardware": name, "model": name, "submitter": name, "file": name,
             "command": name, "why": name, "layout": name, "versions": {name: name}, "notes": [name]}
            for name in HOSTILE]  # fmt: skip
    published = [
        {**next(published_rows()), "source": name, "link": "", "note": name} for name in HOSTILE
    ]
    browser = page(rows, published)
    for i in range(len(rows)):
        browser.find_elements(By.CSS_SELECTOR, 'main td[data-label="hardware"] button')[i].click()
    assert browser.title == "How fast machines train language models"
    assert not browser.find_elements(
        By.CSS_SELECTOR, "main img, main b, #published img, main script"
    )
    assert HOSTILE[0] in cells(browser, "model")
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_ten_thousand_rows_are_filtered_at_once(page, capsys):
    browser = page(many(10_000))
    assert "10,000 of 10,000 results" in browser.find_element(By.ID, "count").text
    times = {}
    for name, value in (("filter-hardware", "GPU 5"), ("tier", "3"), ("filter-hardware", ""),
                        ("filter-model", "gpt2-125m")):  # fmt: skip
        began = time.perf_counter()
        choose(browser, name, value)
        browser.execute_script("return document.body.offsetHeight")
        times[f"{name} {value}"] = time.perf_counter() - began
    with capsys.disabled():
        print("\n10,000 rows:", json.dumps({k: f"{v:.2f} s" for k, v in times.items()}))
    assert 0 < len(cells(browser, "model")) <= 100
    browser.find_element(By.CSS_SELECTOR, "button.more").click()
    assert len(cells(browser, "model")) > 100


def test_a_phone_shows_cards_without_scrolling_aside(page):
    browser = page(rows_of_ours(), published_rows())
    browser.set_window_size(500, 900)
    wide, seen = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= seen
    browser.set_window_size(1400, 1000)
