"""One failure, one reason, whatever words and status a provider chose."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from hermes_agent.errors import FAILURES, FailureReason
from hermes_agent.providers import classify
from hermes_agent.providers.openai_chat import classify_http

R = FailureReason


def reason(status, message="", code=None, **extra):
    error = {"message": message, "code": code, **extra}
    return classify_http(status, {}, {"error": error}).reason


@pytest.mark.parametrize(
    ("status", "message", "code", "expected"),
    [
        (401, "Incorrect API key provided", "invalid_api_key", R.AUTH),
        (403, "no", None, R.AUTH),
        (400, "API key not valid. Please pass a valid API key.", None, R.AUTH),
        (402, "API key USD spend limit exceeded", None, R.BILLING),
        (429, "You exceeded your current quota, check your plan and billing", "insufficient_quota", R.BILLING),
        (429, "used up", "terminal_quota_exhausted", R.BILLING),
        (429, "You exceeded your current quota, please check your billing details", None, R.BILLING),
        (429, "You exceeded your current quota; please retry in 21s (billing page: x)", None, R.RATE_LIMIT),
        (429, "rate limit exceeded", None, R.RATE_LIMIT),
        (429, "Too many requests", None, R.RATE_LIMIT),
        (429, "Rate limit reached; try again in 2s. Add a payment method at /billing", None, R.RATE_LIMIT),
        (429, "the engine is overloaded", None, R.OVERLOADED),
        (0, "rate limit exceeded", None, R.RATE_LIMIT),
        (0, "slow down", "Throttling.AllocationQuota", R.RATE_LIMIT),
        (404, "The model `x` does not exist", "model_not_found", R.MODEL_NOT_FOUND),
        (404, "nothing here", None, R.MODEL_NOT_FOUND),
        (400, "Model gpt-9 not found", None, R.MODEL_NOT_FOUND),
        (408, "late", None, R.TIMEOUT),
        (413, "too big", None, R.CONTEXT_OVERFLOW),
        (400, "This model's maximum context length is 8192 tokens", "context_length_exceeded", R.CONTEXT_OVERFLOW),
        (400, "prompt is too long: 210000 tokens > 200000 maximum", None, R.CONTEXT_OVERFLOW),
        (500, "the request exceeds the available context size", None, R.CONTEXT_OVERFLOW),
        (503, "busy", None, R.OVERLOADED),
        (529, "x", None, R.OVERLOADED),
        (500, "boom", None, R.SERVER_ERROR),
        (504, "late", None, R.SERVER_ERROR),
        (400, "bad schema", None, R.BAD_REQUEST),
        (422, "bad schema", None, R.BAD_REQUEST),
        (400, "x", "content_policy_violation", R.CONTENT_BLOCKED),
        (400, "triggered the content management policy", None, R.CONTENT_BLOCKED),
        (307, "moved", None, R.INVALID_RESPONSE),
        (0, "?", None, R.UNKNOWN),
    ],
)
def test_reason(status, message, code, expected):
    assert reason(status, message, code) is expected


def test_a_billing_refusal_is_not_retried_and_a_rate_limit_is():
    assert not FAILURES[reason(429, "x", "insufficient_quota")].retry
    assert FAILURES[reason(429, "rate limit exceeded")].retry


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "the words"}}',
        b'{"error": "the words"}',
        b'{"message": "the words"}',
        b'{"detail": "the words"}',
        b'[{"error": {"message": "the words"}}]',
        b"the words",
        b"<html><head><style>x</style></head><body><h1>the  words</h1></body></html>",
        {"error": {"message": "the words"}},
    ],
)
def test_the_message_is_one_line_with_place_status_and_words(body):
    assert str(classify_http(500, {}, body, where="host (m)")) == "host (m): HTTP 500: the words"


def test_a_long_body_is_cut():
    assert len(str(classify_http(500, {}, "x" * 100_000))) < 400


def test_a_404_that_names_no_model_asks_for_the_base_url():
    assert "base URL" in str(classify_http(404, {}, b"404 page not found"))
    assert "base URL" not in str(classify_http(404, {}, {"error": {"message": "model x does not exist"}}))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Retry-After": "3"}, 3),
        ({"Retry-After": "0.5"}, 0.5),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "1500", "Retry-After": "9"}, 1.5),
        ({"Retry-After": "86400"}, 600),
        ({"Retry-After": "0"}, None),
        ({"Retry-After": "-1"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "Mon, 32 Foo 2026 GMT"}, None),
        ({"Date": formatdate(1000, usegmt=True), "Retry-After": formatdate(1007, usegmt=True)}, 7),
        ({"Date": formatdate(1000, usegmt=True), "Retry-After": formatdate(900, usegmt=True)}, None),
        ({}, None),
    ],
)
def test_retry_after(headers, expected):
    assert classify_http(429, headers, b"").retry_after == expected


def test_a_date_without_the_servers_clock_is_measured_with_ours():
    wait = classify_http(429, {"Retry-After": formatdate(time.time() + 30, usegmt=True)}, b"").retry_after
    assert wait is not None
    assert 25 < wait <= 30


@pytest.mark.parametrize("body", [{"retry_after": 4}, {"error": {"message": "x", "retry_after": 4}}])
def test_a_wait_in_the_body_counts(body):
    assert classify_http(429, {}, body).retry_after == 4


@pytest.mark.parametrize(
    "said",
    [
        "Incorrect API key provided: sk-test-CANARY1234567890.",
        "key=sk-test-CANARY12****7890",
        "the middle is ANARY12345",
        "Bearer sk-test-CANARY1234567890 and again sk-test-CANARY1234567890",
    ],
)
def test_no_piece_of_a_key_is_in_the_message(said):
    text = str(classify_http(401, {}, {"error": {"message": said}}, secrets=["sk-test-CANARY1234567890"]))
    assert "ANARY1" not in text
    assert "***" in text


def test_redaction_leaves_other_words_alone():
    assert classify.redact("nothing of it here", ["sk-test-CANARY1234567890"]) == "nothing of it here"
    assert classify.redact("ollama says no", ["ollama"]) == "ollama says no"


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ({"choices": [{"delta": {}}]}, False),
        ({"choices": [], "usage": {}}, False),
        ({"choices": [{"delta": {}}], "error": None}, False),
        ({"choices": [{"delta": {}}], "code": 0, "message": "ok"}, False),
        ({"error": "x"}, True),
        ({"code": "Throttling", "message": "x"}, True),
        ({"choices": None, "error_message": "x"}, True),
    ],
)
def test_a_frame_is_an_error_only_when_it_says_so(frame, expected):
    assert classify.is_fault(frame) is expected
