#!/usr/bin/env python3
"""Drives the page of `weft serve` in Chromium (PyPI: selenium; Debian: chromium, chromium-driver). scripts/test.sh page makes its
environment.

    tests/serve/page_test.py [--pictures FOLDER]    also keeps screenshots
"""

import os
import pathlib
import sys
import unittest

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from served import eventually, served

PICTURES = None


def browser(width=1280, height=900, dark=False, phone=False):
    options = webdriver.ChromeOptions()
    options.binary_location = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                     f"--window-size={width},{height}"):
        options.add_argument(argument)
    if phone:
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 2}})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(os.environ.get("CHROMEDRIVER", "/usr/bin/chromedriver")))
    made.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]})
    return made


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = served("--capacity", "8192")
        cls.url = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def open(self, **kind):
        self.page = browser(**kind)
        self.addCleanup(self.page.quit)
        self.page.get(self.url)
        self.assertTrue(eventually(lambda: self.text("#model") == "weft-11m"), self.text("body"))

    def all(self, selector):
        return self.page.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector):
        found = self.all(selector)
        return found[0].text if found else ""

    def picture(self, name):
        if PICTURES:
            self.page.save_screenshot(str(PICTURES / f"{name}.png"))

    def say(self, text, branch=0):
        self.all(".branch textarea")[branch].send_keys(text, Keys.ENTER)

    def finished(self, count, seconds=20):
        return eventually(lambda: len(self.all(".turn")) == count and not self.all(".turn.writing"), seconds)

    def choose(self, control, value):
        self.page.execute_script("const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input'));",
                                 control, value)

    def no_complaints(self):
        lines = [line for line in self.page.get_log("browser") if line["level"] == "SEVERE"]
        self.assertEqual(lines, [])

    def test_types_streams_forks_and_survives_a_reload(self):
        self.open()
        self.assertIn("no chat template", self.text("#plain"))
        self.choose("temperature", "0")
        self.choose("most", "120")
        self.page.execute_script("""
            window.grown = new Set();
            new MutationObserver(() => document.querySelectorAll(".turn.assistant .text").forEach(e => window.grown.add(e.textContent.length)))
              .observe(document.getElementById("branches"), {subtree: true, childList: true, characterData: true});""")
        self.say("The ship was at sea, and")
        self.assertTrue(self.finished(2))
        self.assertGreater(self.page.execute_script("return window.grown.size"), 3, "the text came in one piece")
        answer = self.text(".turn.assistant .text")
        self.assertIn("120 tokens", self.text(".turn.assistant .facts"))
        # The second turn reads only what is new.
        self.say("Then the captain said:")
        self.assertTrue(self.finished(4))
        facts = self.all(".turn.assistant .facts")[1].text
        cached, prompt = (int(word) for word in facts.split("; ")[-1].split(" prompt")[0].split(" of "))
        self.assertGreater(cached, 100)
        self.assertLess(prompt - cached, 12)
        # A fork at the first answer: both are there, and go their own ways.
        self.all(".turn.assistant .fork")[0].click()
        self.assertTrue(eventually(lambda: len(self.all(".branch")) == 2))
        self.assertEqual(len(self.all(".branch")[1].find_elements(By.CSS_SELECTOR, ".turn")), 2)
        self.choose("temperature", "0.8")
        self.say("But the cook", branch=1)
        self.assertTrue(self.finished(8))
        self.assertEqual([e.text for e in self.all(".turn .text")].count(answer), 2)
        self.assertTrue(eventually(lambda: self.text("#memory").endswith("MB") and "of 8" in self.text("#batch")))
        self.assertTrue(eventually(lambda: len(self.all("#rateplot path")) == 2))
        self.picture("desktop")
        # Everything is there after a reload, in the same words.
        before = [e.text for e in self.all(".turn .text")]
        self.page.refresh()
        self.assertTrue(eventually(lambda: [e.text for e in self.all(".turn .text")] == before))
        self.assertEqual(self.page.find_element(By.ID, "temperature").get_attribute("value"), "0.8")
        # Closing one leaves the other.
        self.all(".branch .top button")[1].click()
        self.assertTrue(eventually(lambda: len(self.all(".branch")) == 1))
        self.no_complaints()

    def test_stops_and_stop_strings(self):
        self.open()
        self.choose("temperature", "0")
        self.choose("most", "7000")
        self.say("The ship")
        self.assertTrue(eventually(lambda: len(self.text(".turn.assistant .text")) > 20))
        self.all(".branch textarea")[0].send_keys(Keys.ESCAPE)
        self.assertTrue(self.finished(2))
        self.assertIn("stopped", self.text(".turn.assistant .facts"))
        self.choose("most", "60")
        self.choose("stop", ",")
        self.say("The ship")
        self.assertTrue(self.finished(4))
        self.assertNotIn(",", self.all(".turn.assistant .text")[1].text)
        self.no_complaints()

    def test_an_error_is_shown_and_the_words_are_kept(self):
        self.open()
        self.page.execute_script("const e = document.querySelector('textarea'); e.value = 'word '.repeat(9000); e.dispatchEvent(new Event('input'));")
        self.all(".branch textarea")[0].send_keys(Keys.ENTER)
        self.assertTrue(eventually(lambda: "wanted fewer than the 8192" in self.text(".fault")), self.text("body"))
        self.assertEqual(self.text(".fault").count("\n"), 0)
        self.assertTrue(self.all(".branch textarea")[0].get_attribute("value").startswith("word word"))
        self.picture("error")

    def test_keyboard_alone(self):
        self.open()
        self.choose("most", "5")
        seen = []
        for _ in range(12):
            self.page.switch_to.active_element.send_keys(Keys.TAB)
            active = self.page.switch_to.active_element
            seen.append(active.get_attribute("id") or active.tag_name)
            if active.tag_name == "textarea":
                break
        self.assertEqual(seen[:4], ["temperature", "most", "stop", "fresh"])
        self.assertEqual(seen[-1], "textarea")
        self.page.switch_to.active_element.send_keys("The ship", Keys.SHIFT + Keys.ENTER)
        self.assertEqual(len(self.all(".turn")), 0)
        self.page.switch_to.active_element.send_keys(Keys.ENTER)
        self.assertTrue(self.finished(2))
        self.assertEqual(self.page.switch_to.active_element.tag_name, "textarea")

    def test_text_is_text(self):
        self.open()
        self.choose("most", "3")
        self.say("<img src=x onerror=alert(1)><b>bold</b>")
        self.assertTrue(self.finished(2))
        self.assertEqual(len(self.all(".turn img, .turn b")), 0)
        self.assertIn("<b>bold</b>", self.text(".turn.user .text"))
        # The policy holds: a script that is added does not run, and nothing is loaded from elsewhere.
        self.page.execute_script("const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s);")
        self.assertIsNone(self.page.execute_script("return window.ran || null"))

    def test_phone_and_dark(self):
        for name, kind in (("phone", dict(width=390, height=844, phone=True)),
                           ("phone-dark", dict(width=390, height=844, phone=True, dark=True)), ("dark", dict(dark=True))):
            with self.subTest(name):
                self.open(**kind)
                self.choose("temperature", "0")
                self.choose("most", "60")
                self.say("The ship was at sea, and")
                self.assertTrue(self.finished(2))
                self.all(".turn.assistant .fork")[0].click()
                self.say("Then", branch=1)
                self.assertTrue(self.finished(6))
                # The fork begins with the memory of the conversation: its prompts are too short for the prefix store.
                facts = self.all(".turn.assistant .facts")[-1].get_attribute("textContent")
                self.assertGreater(int(facts.split("; ")[-1].split(" of ")[0]), 55, facts)
                width = self.page.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
                self.assertLessEqual(width[0], width[1], "the page is wider than the screen")
                if kind.get("phone"):
                    self.assertEqual([e.is_displayed() for e in self.all(".branch")], [False, True])
                    self.all("#tabs button")[0].click()
                    self.assertEqual([e.is_displayed() for e in self.all(".branch")], [True, False])
                eventually(lambda: len(self.all("#rateplot path")) == 2, 4)
                self.picture(name)
                self.no_complaints()


class Key(unittest.TestCase):
    def test_the_page_asks_for_the_key(self):
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "key"
            file.touch(mode=0o600)
            file.write_text("0123456789abcdef0123\n")
            with served("--api-key-file", str(file)) as url:
                page = browser()
                self.addCleanup(page.quit)
                page.get(url)
                form = page.find_element(By.ID, "keyform")
                self.assertTrue(eventually(form.is_displayed))
                page.find_element(By.ID, "key").send_keys("0123456789abcdef0123", Keys.ENTER)
                self.assertTrue(eventually(lambda: page.find_element(By.ID, "model").text == "weft-11m"))
                self.assertFalse(form.is_displayed())


if __name__ == "__main__":
    if "--pictures" in sys.argv:
        at = sys.argv.index("--pictures")
        PICTURES = pathlib.Path(sys.argv[at + 1])
        PICTURES.mkdir(parents=True, exist_ok=True)
        del sys.argv[at:at + 2]
    unittest.main()
