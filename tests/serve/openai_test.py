#!/usr/bin/env python3
"""Drives `weft serve` with the official openai client (PyPI: openai). scripts/test.sh serve makes its environment."""

import concurrent.futures
import pathlib
import tempfile
import unittest

import openai

from served import served

MODEL = "weft-11m"
GREEDY = {"model": MODEL, "temperature": 0}


class Client(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = served("--max-sequences", "4", "--capacity", "1024")
        cls.url = cls.context.__enter__()
        cls.client = openai.OpenAI(base_url=cls.url + "/v1", api_key="none", max_retries=0, timeout=60)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.context.__exit__(None, None, None)

    def test_models(self):
        self.assertEqual([model.id for model in self.client.models.list()], [MODEL])
        self.assertEqual(self.client.models.retrieve(MODEL).owned_by, "weft")
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("gpt-4")

    def test_completion_whole_and_streamed(self):
        whole = self.client.completions.create(prompt="The ship", max_tokens=20, **GREEDY)
        self.assertEqual(whole.choices[0].finish_reason, "length")
        self.assertEqual((whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens), (2, 20, 22))
        self.assertEqual(whole.usage.prompt_tokens_details.cached_tokens, 0)
        stream = self.client.completions.create(prompt="The ship", max_tokens=20, stream=True, stream_options={"include_usage": True},
                                                **GREEDY)
        events = list(stream)
        self.assertEqual("".join(event.choices[0].text for event in events if event.choices), whole.choices[0].text)
        self.assertEqual(events[-1].usage, whole.usage)

    def test_completion_options(self):
        made = self.client.completions.create(
            model=MODEL, prompt=["The ship", "A dog"], n=2, max_tokens=8, temperature=0.9, top_p=0.9, presence_penalty=0.5,
            frequency_penalty=0, seed=3, stop=["zzz"], user="someone", echo=True,
            extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1})
        self.assertEqual([choice.index for choice in made.choices], [0, 1, 2, 3])
        self.assertTrue(all(choice.text.startswith("The ship" if i < 2 else "A dog") for i, choice in enumerate(made.choices)))
        again = self.client.completions.create(
            model=MODEL, prompt=["The ship", "A dog"], n=2, max_tokens=8, temperature=0.9, top_p=0.9, presence_penalty=0.5, seed=3,
            echo=True, extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1})
        self.assertEqual([choice.text for choice in again.choices], [choice.text for choice in made.choices])
        few = self.client.completions.create(prompt="The ship", max_tokens=3, logprobs=2, **GREEDY).choices[0].logprobs
        self.assertEqual((len(few.tokens), len(few.token_logprobs), len(few.top_logprobs[0])), (3, 3, 2))
        scored = self.client.completions.create(prompt="The ship", max_tokens=0, logprobs=1, echo=True, **GREEDY).choices[0]
        self.assertEqual((scored.text, "".join(scored.logprobs.tokens), scored.logprobs.token_logprobs[0]), ("The ship", "The ship", None))
        self.assertLess(scored.logprobs.token_logprobs[1], 0)
        stop = self.client.completions.create(prompt="The ship", max_tokens=20, stop=" company", **GREEDY)
        self.assertEqual((stop.choices[0].text, stop.choices[0].finish_reason), ("'s", "stop"))

    def test_chat_whole_and_streamed(self):
        messages = [{"role": "user", "content": "The ship"}]
        whole = self.client.chat.completions.create(messages=messages, max_completion_tokens=12, logprobs=True, top_logprobs=2, **GREEDY)
        self.assertEqual(whole.choices[0].message.role, "assistant")
        self.assertEqual(len(whole.choices[0].logprobs.content), 12)
        self.assertEqual(len(whole.choices[0].logprobs.content[0].top_logprobs), 2)
        stream = self.client.chat.completions.create(messages=messages, max_tokens=12, stream=True, **GREEDY)
        text, finish = "", None
        for event in stream:
            text += event.choices[0].delta.content or ""
            finish = event.choices[0].finish_reason or finish
        self.assertEqual((text, finish), (whole.choices[0].message.content, "length"))
        with self.client.chat.completions.stream(messages=messages, max_tokens=12, stop=",", **GREEDY) as helper:
            self.assertEqual(helper.get_final_completion().choices[0].message.content, text.split(",")[0])

    def test_a_message_of_the_client_can_be_sent_back(self):
        first = self.client.chat.completions.create(messages=[{"role": "user", "content": "The ship"}], max_tokens=5,
                                                    extra_body={"session": "back"}, **GREEDY)
        messages = [{"role": "user", "content": "The ship"}, first.choices[0].message, {"role": "user", "content": "and"}]
        second = self.client.chat.completions.create(messages=messages, max_tokens=5, extra_body={"session": "back"}, **GREEDY)
        self.assertGreater(second.usage.prompt_tokens_details.cached_tokens, 4)

    def test_errors_name_the_field(self):
        for arguments, param, code in (({"temperature": 3}, "temperature", "invalid_value"), ({"logit_bias": {"1": 1}}, "logit_bias", "unsupported_parameter"),
                                       ({"extra_body": {"wrong": 1}}, "wrong", "unknown_parameter"), ({"n": 99}, "n", "invalid_value")):
            with self.assertRaises(openai.BadRequestError) as caught:
                self.client.completions.create(model=MODEL, prompt="a", **arguments)
            self.assertEqual((caught.exception.param, caught.exception.code, caught.exception.type), (param, code, "invalid_request_error"))
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}],
                                                tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
        self.assertEqual(caught.exception.param, "tools")
        with self.assertRaises(openai.NotFoundError):
            self.client.completions.create(model="gpt-4", prompt="a")

    def test_many_at_once_equal_one_alone(self):
        prompts = ["The ship", "A dog", "It was a dark night, and", "In the beginning"] * 3
        write = lambda prompt: self.client.completions.create(prompt=prompt, max_tokens=30, **GREEDY).choices[0].text
        alone = {prompt: write(prompt) for prompt in set(prompts)}
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            self.assertEqual(list(pool.map(write, prompts)), [alone[prompt] for prompt in prompts])

    def test_a_stream_that_is_closed_ends_its_request(self):
        stream = self.client.completions.create(prompt="The ship", max_tokens=1000, stream=True, **GREEDY)
        next(iter(stream))
        stream.close()
        self.assertEqual(self.client.completions.create(prompt="The ship", max_tokens=3, **GREEDY).usage.completion_tokens, 3)


class Key(unittest.TestCase):
    def test_wrong_and_right(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "key"
            file.touch(mode=0o600)
            file.write_text("0123456789abcdef0123\n")
            with served("--api-key-file", str(file)) as url:
                with self.assertRaises(openai.AuthenticationError):
                    openai.OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0).models.list()
                with openai.OpenAI(base_url=url + "/v1", api_key="0123456789abcdef0123", max_retries=0) as client:
                    self.assertEqual(len(list(client.models.list())), 1)


class Queue(unittest.TestCase):
    def test_a_full_queue_is_a_rate_limit(self):
        with served("--max-sequences", "1", "--max-queue", "1", "--capacity", "30000") as url:
            with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
                create = lambda: client.completions.create(prompt="The ship", max_tokens=29000, stream=True, **GREEDY)
                running = create()
                next(iter(running))
                waiting = create()
                with self.assertRaises(openai.RateLimitError):
                    create()
                waiting.close()
                running.close()


if __name__ == "__main__":
    unittest.main()
