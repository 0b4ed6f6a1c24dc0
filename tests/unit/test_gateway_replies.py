"""Errors leave in one shape, with a status for every reason and nothing secret in them."""

from __future__ import annotations

import json

import msgspec
import pytest

from hermes_agent import errors
from hermes_agent.errors import FAILURES, FailureReason, HermesError, ProviderError, SettingsError
from hermes_agent.gateway import replies
from hermes_agent.gateway.replies import ApiError


def body_of(response):
    assert response.content_type == "application/json"
    return json.loads(response.body)


@pytest.mark.parametrize("reason", FailureReason)
def test_every_reason_has_a_status_that_fits_what_may_be_done(reason):
    status = replies.STATUS[reason]
    assert 400 <= status < 600
    # 401 and 403 would blame the caller's key, 408 is about the caller's own request.
    assert status not in {401, 403, 408}
    error = replies.from_error(HermesError("It went wrong.", reason=reason))
    response = error.to_response()
    assert response.status == status
    assert body_of(response)["error"]["failure"] == {
        "reason": reason.value,
        "retryable": FAILURES[reason].retry,
        "action": FAILURES[reason].advice,
    }
    assert (response.headers.get("X-Should-Retry") == "false") == (not FAILURES[reason].retry)
    assert ("Retry-After" in response.headers) == (FAILURES[reason].retry and status in {409, 429, 503})


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.UnknownSession("no session x"), 404, "session_not_found"),
        (errors.AmbiguousSession("two"), 409, "ambiguous_session"),
        (errors.SessionBusy(), 409, "session_active_turn"),
        (errors.QueueFull(), 429, "rate_limit_exceeded"),
        (errors.Draining(), 503, "gateway_draining"),
        (errors.StoreFull(), 507, "store_full"),
        (errors.UsageError("no"), 400, "usage"),
        (errors.CommitUnknown(), 503, "store_io"),
    ],
)
def test_errors_of_the_program_have_the_codes_that_clients_know(error, status, code):
    found = replies.from_error(error)
    assert (found.status, found.code, found.message) == (status, code, str(error))


def test_a_broken_setting_is_not_shown_to_clients():
    error = replies.from_error(SettingsError("config.yaml:3: api_key is hunter2"))
    assert (error.status, error.code) == (500, "settings_error")
    assert "hunter2" not in error.message


@pytest.mark.parametrize(
    ("asked", "told"), [(2.1, "3"), (0.0, "0"), (None, "1"), (float("inf"), "1"), (float("nan"), "1"), (-5.0, "1")]
)
def test_the_wait_that_the_model_s_server_asked_for_is_passed_on(asked, told):
    error = ProviderError("slow down", reason=FailureReason.RATE_LIMIT, retry_after=asked)
    assert replies.from_error(error).headers == {"Retry-After": told}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "gateway_auth_error"),
        (403, "permission_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (507, "server_error"),
    ],
)
def test_the_type_follows_from_the_status(status, kind):
    assert body_of(ApiError(status, "c", "m").to_response()) == {
        "error": {"message": "m", "type": kind, "param": None, "code": "c"}
    }


def test_type_param_headers_and_closing_can_be_given():
    error = ApiError(400, None, "m", error_type="own", param="a.b", headers={"X-A": "1"}, close=True)
    response = error.to_response()
    assert body_of(response)["error"] == {"message": "m", "type": "own", "param": "a.b", "code": None}
    assert response.headers["X-A"] == "1"
    assert response.keep_alive is False


def test_what_looks_like_a_key_is_blotted_out():
    error = ApiError(400, "c", "refused: Bearer abcdefghijk and sk-test-CANARY1234567890")
    assert "CANARY" not in error.to_response().text
    assert "abcdefghijk" not in error.to_response().text


class Point(msgspec.Struct):
    x: float
    name: str


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, "\u00e9", None]}, '{"a":[1,"\u00e9",null]}'),
        (Point(float("nan"), "p"), '{"x":null,"name":"p"}'),
        ([float("inf"), float("-inf")], "[null,null]"),
        ({"\ud800": "a\udfff"}, '{"\ufffd":"a\ufffd"}'),
        ([Point(1.0, "\ud83d\ude00")], '[{"x":1.0,"name":"\U0001f600"}]'),
    ],
)
def test_any_value_becomes_valid_json(value, text):
    response = replies.json_reply(value, 201, {"X-A": "1"})
    assert (response.status, response.headers["X-A"]) == (201, "1")
    assert response.headers["Content-Type"] == "application/json"
    assert response.body.decode() == text
    assert replies.to_json(value) == response.body
