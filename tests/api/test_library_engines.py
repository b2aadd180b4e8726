"""``LLM``, ``LLMEngine`` and ``AsyncLLM`` with the bundled model: one way of running, so the same tokens."""

from __future__ import annotations

import asyncio

import pytest

from preheat import LLM, AsyncEngineArgs, AsyncLLM, EngineDead, InvalidRequest, RequestOutputKind, SamplingParams

OPTIONS = {"max_model_len": 128, "max_num_seqs": 4, "num_threads": 1, "dtype": "float32", "skip_warmup": True}
PROMPTS = ["def add(a, b):", "import os"]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm():
    return LLM(**OPTIONS)


@pytest.fixture(scope="module")
def texts(llm):
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_queued_prompts_are_generated_in_order(llm, texts):
    ids = [*llm.enqueue(PROMPTS[:1], GREEDY), *llm.enqueue(PROMPTS[1:], GREEDY)]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [(output.request_id, output.outputs[0].text) for output in outputs] == [*zip(ids, texts, strict=True)]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_steps_report_outputs_of_each_kind(llm, texts):
    engine, heard = llm.llm_engine, dict.fromkeys(RequestOutputKind, ())
    for kind in RequestOutputKind:
        engine.add_request(kind.name, PROMPTS[0], SamplingParams(temperature=0, max_tokens=6, output_kind=kind))
    with pytest.raises(InvalidRequest, match="belongs to a running request"):
        engine.add_request("DELTA", PROMPTS[0], GREEDY)
    while engine.has_unfinished_requests():
        for output in engine.step():
            heard[RequestOutputKind[output.request_id]] += (output.outputs[0].text,)
    assert "".join(heard[RequestOutputKind.DELTA]) == texts[0]
    assert heard[RequestOutputKind.FINAL_ONLY] == (texts[0],)
    assert heard[RequestOutputKind.CUMULATIVE][-1] == texts[0] and len(heard[RequestOutputKind.CUMULATIVE]) == 6


def test_outputs_tell_times_and_no_text_where_none_was_asked_for(llm):
    silent = SamplingParams(temperature=0, max_tokens=2, detokenize=False, logprobs=1, flat_logprobs=True)
    (output,) = llm.generate(PROMPTS[0], silent, use_tqdm=False, priority=0)
    assert output.outputs[0].logprobs.decoded_tokens == [None, None]
    times = output.metrics
    assert times.num_generation_tokens == 2
    assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts


def test_a_trace_of_some_steps(llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llm.start_profile("mine")
    with pytest.raises(InvalidRequest, match="already"):
        llm.start_profile()
    llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    llm.stop_profile()
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("mine_trace_") and '"process_results"' in file.read_text()
    with pytest.raises(InvalidRequest, match="no trace"):
        llm.stop_profile()


def test_the_model_can_be_looked_at(llm):
    assert llm.apply_model(lambda model: len(model.weights.layers)) == [len(llm.loop.executor.decoder.weights.layers)]
    assert llm.collective_rpc(lambda worker, more: worker.rank + more, args=(3,)) == [3]


def test_a_template_of_ones_own(llm):
    talk = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    asked = {"sampling_params": SamplingParams(max_tokens=1), "use_tqdm": False}
    template = "{{ messages[0].content if messages[0].content is string else messages[0].content[0].text ~ '!' }}"
    for form, prompt in {"auto": "hi", "string": "hi", "openai": "hi!"}.items():
        (output,) = llm.chat(talk, **asked, chat_template=template, chat_template_content_format=form)
        assert output.prompt == prompt
    for bad, why in (
        ({"chat_template": "{{"}, "chat template"),
        ({"chat_template_content_format": "xml"}, "chat_template_content_format"),
        ({"color": "red"}, "color"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            llm.chat(talk, **asked, **bad)


def test_iterators(texts):
    async def last(engine: AsyncLLM, prompt: str, request_id: str) -> str:
        return [output.outputs[0].text async for output in engine.generate(prompt, GREEDY, request_id)][-1]

    async def use(engine: AsyncLLM) -> None:
        ids = [str(number) for number in range(len(PROMPTS))]
        assert await asyncio.gather(*(last(engine, *each) for each in zip(PROMPTS, ids, strict=True))) == texts
        with pytest.raises(InvalidRequest, match="empty"):
            await last(engine, [], "none")  # type: ignore[arg-type]
        endless, heard = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), []
        async for output in engine.generate(PROMPTS[0], endless, "long"):
            heard.append(output.outputs[0].finish_reason)
            if len(heard) == 2:
                await engine.abort("long")
        assert heard[-1] == "abort" and len(heard) < 100
        iterator = engine.generate(PROMPTS[0], endless, "left")
        await anext(iterator)
        await iterator.aclose()
        await engine.wait_for_requests_to_drain(60)
        assert await last(engine, PROMPTS[0], "left") == texts[0]
        engine.shutdown()
        assert engine.errored and not engine.is_running
        with pytest.raises(EngineDead, match="shut down"):
            await last(engine, PROMPTS[0], "late")

    asyncio.run(use(AsyncLLM.from_engine_args(AsyncEngineArgs(**OPTIONS))))
