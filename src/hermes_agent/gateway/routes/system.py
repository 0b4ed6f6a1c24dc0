"""What the server says of itself: that it is well, what it can do, which models it offers, how much it does."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from aiohttp import web

from hermes_agent.errors import HermesError
from hermes_agent.gateway import metrics, openapi, replies
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.keys import Scope
from hermes_agent.gateway.profile import Profile
from hermes_agent.gateway.table import Route
from hermes_agent.settings import ApiServerSettings
from hermes_agent.version import VERSION

LEAST_FREE_BYTES = 64 * 1024 * 1024
"""Free space on the store's disk below which the server is not well."""

TABLE = web.AppKey("table", tuple[Route, ...])
"""Under this key an application holds all its routes."""
SERVER = web.AppKey("server", ApiServerSettings)
"""Under this one how it is served."""


@lru_cache(maxsize=1)
def _document(routes: tuple[Route, ...]) -> bytes:
    return replies.to_json(openapi.document(routes))


async def health(_call: Call) -> web.StreamResponse:
    """Say that the server answers."""
    return replies.json_reply({"status": "ok", "platform": "hermes-agent", "version": VERSION})


async def detailed(call: Call) -> web.StreamResponse:
    """Look at all that the server needs."""
    profile = call.profile
    return replies.json_reply(await profile.read(_health, profile))


def _health(profile: Profile) -> dict[str, Any]:
    place = profile.settings.endpoint(model="", provider="", base_url="", api_key="")
    load, draining = profile.service.load, profile.service.is_draining
    checks = {
        "state_db": _state_db(profile),
        "config": {"status": "ok", "warnings": len(profile.settings.warnings)},
        "model": {"status": "ok" if place is not None else "missing", "model": place.model if place else None},
        "disk": _disk(profile),
        "gateway": {"status": "draining" if draining else "ok"},
        "queue": {"status": "ok" if load["waiting"] < profile.service.bounds.waiting else "full", **load},
    }
    well = all(check["status"] == "ok" for check in checks.values())
    return {
        "status": "draining" if draining else "ok" if well else "degraded",
        "platform": "hermes-agent",
        "version": VERSION,
        "pid": os.getpid(),
        "profile": profile.name,
        "uptime_seconds": round(time.time() - profile.started_at, 3),
        "gateway_state": "draining" if draining else "running",
        "active_agents": load["running"],
        "gateway_busy": load["running"] > 0,
        "gateway_drainable": load["running"] == 0,
        "checks": checks,
        "metrics": {"turns": profile.turns.total(), "turn_seconds_p95": profile.turn_seconds.quantile(0.95)},
    }


def _state_db(profile: Profile) -> dict[str, Any]:
    try:
        found = profile.db.database.schema_version()
    except HermesError as error:
        return {"status": "failed", **replies.failure_fields(error.reason)}
    return {"status": "ok", "schema": found, "wal_bytes": _wal_bytes(profile)}


def _disk(profile: Profile) -> dict[str, Any]:
    try:
        free = shutil.disk_usage(profile.home).free
    except OSError as error:
        return {"status": "failed", "error": error.strerror}
    return {"status": "ok" if free > LEAST_FREE_BYTES else "low", "free_bytes": free}


def _wal_bytes(profile: Profile) -> int:
    try:
        return os.stat(f"{profile.db.db_path}-wal").st_size
    except FileNotFoundError:
        return 0


async def models(call: Call) -> web.StreamResponse:
    """List what `model` may name."""
    name = call.profile.model_name
    row: dict[str, Any] = {
        "id": name, "object": "model", "created": int(call.profile.started_at), "owned_by": "hermes",
        "permission": [], "root": name, "parent": None,
    }  # fmt: skip
    return replies.json_reply({"object": "list", "data": [row]})


async def capabilities(call: Call) -> web.StreamResponse:
    """Say what this server can do, and where."""
    routes = call.request.app[TABLE]
    return replies.json_reply(
        {
            "object": "hermes.api_server.capabilities",
            "platform": "hermes-agent",
            "version": VERSION,
            "model": call.profile.model_name,
            "auth": {"type": "bearer", "required": True},
            "runtime": {"mode": "server_agent", "tool_execution": "server", "split_runtime": False},
            "features": {**features(routes), "cors": bool(call.request.app[SERVER].cors_origins)},
            "endpoints": {route.name: {"method": route.method, "path": route.path} for route in routes},
        }
    )


def features(routes: Sequence[Route]) -> dict[str, Any]:
    """What clients may rely on: each feature that is a route exists exactly where that route does."""
    known = {route.name: route for route in routes}
    found: dict[str, Any] = {feature: name in known for feature, name in _BY_ROUTE.items()}
    found |= {feature: name in known and known[name].streams for feature, name in _BY_STREAM.items()}
    return found | _FIXED


_BY_ROUTE = {
    "chat_completions": "createChatCompletion",
    "responses_api": "createResponse",
    "run_submission": "startRun",
    "run_status": "getRun",
    "run_stop": "stopRun",
    "run_steer": "steerRun",
    "run_approval_response": "approveRun",
    "approvals": "decideApproval",
    "deliveries": "getDelivery",
    "session_resources": "readSession",
    "session_search": "searchSessions",
    "session_chat": "sessionChat",
    "session_fork": "forkSession",
    "session_stop": "stopSession",
}
"""Features and the operation that each is."""
_BY_STREAM = {
    "chat_completions_streaming": "createChatCompletion",
    "tool_progress_events": "createChatCompletion",
    "responses_streaming": "createResponse",
    "run_events_sse": "runEvents",
    "approval_events": "runEvents",
    "reasoning_streaming": "sessionChatStream",
    "session_chat_streaming": "sessionChatStream",
    "session_events": "sessionEvents",
}
"""Features that are the stream of an operation."""
_ONCE = {"supported": True, "durable": True, "retention_seconds": 7 * 24 * 3600}
"""A message is known again for as long as its session is kept: at least so long."""
_FIXED: dict[str, Any] = {
    "idempotency": _ONCE,
    "runs_idempotency": _ONCE,
    "session_continuity_header": "X-Hermes-Session-Id",
    "session_key_header": "X-Hermes-Session-Key",
    "strict_status": "Prefer: status=strict",
    "session_model_lock": False,
    "skills_api": False,
    "admin_config_rw": False,
    "memory_write_api": False,
    "jobs_admin": False,
    "audio_api": False,
    "realtime_voice": False,
}


async def openapi_document(call: Call) -> web.StreamResponse:
    """The OpenAPI document."""
    return web.Response(body=_document(call.request.app[TABLE]), content_type="application/json")


async def prometheus(call: Call) -> web.StreamResponse:
    """Count what the server does."""
    profile = call.profile
    lines = await profile.read(_metrics, profile)
    return web.Response(
        text="\n".join([*lines, ""]), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    )


def _metrics(profile: Profile) -> list[str]:
    own: metrics.Labels = (("profile", profile.name),)
    load = profile.service.load
    lines = metrics.head("hermes_build_info", "gauge", "Which version runs.")
    lines.append(metrics.sample("hermes_build_info", (*own, ("version", VERSION)), 1))
    lines += metrics.head("hermes_start_time_seconds", "gauge", "When the profile was opened, in seconds since 1970.")
    lines.append(metrics.sample("hermes_start_time_seconds", own, round(profile.started_at, 3)))
    lines += metrics.head("hermes_turns_total", "counter", "Turns that ended, by their last state.")
    lines += profile.turns.lines("hermes_turns_total", "state", own)
    lines += metrics.head("hermes_turn_failures_total", "counter", "Turns that ended without an answer, by reason.")
    lines += profile.failures.lines("hermes_turn_failures_total", "reason", own)
    lines += metrics.head("hermes_accept_seconds", "histogram", "From a message's arrival until it was durable.")
    lines += profile.accept_seconds.lines("hermes_accept_seconds", own)
    lines += metrics.head("hermes_turn_seconds", "histogram", "From a message's arrival to the end of its turn.")
    lines += profile.turn_seconds.lines("hermes_turn_seconds", own)
    lines += metrics.head("hermes_unknown_effects", "gauge", "Calls of which nobody knows whether they took effect.")
    lines.append(metrics.sample("hermes_unknown_effects", own, profile.service.intake.unknown_effects()))
    for name, about in (("running", "Turns that run."), ("waiting", "Messages that wait.")):
        lines += metrics.head(f"hermes_turns_{name}", "gauge", about)
        lines.append(metrics.sample(f"hermes_turns_{name}", own, load[name]))
    lines += metrics.head("hermes_wal_bytes", "gauge", "Size of the store's write-ahead log.")
    lines.append(metrics.sample("hermes_wal_bytes", own, _wal_bytes(profile)))
    lines += metrics.head("hermes_store_commits_total", "counter", "Transactions committed.")
    lines.append(metrics.sample("hermes_store_commits_total", own, profile.db.commits))
    return lines


ROUTES = (
    Route("GET", "/health", "health", health, None, "Say that the server answers."),
    Route("GET", "/v1/health", "healthV1", health, None, "Say that the server answers."),
    Route("GET", "/health/detailed", "healthDetailed", detailed, Scope.ADMIN, "Look at all that the server needs."),
    Route("GET", "/metrics", "metrics", prometheus, Scope.ADMIN, "Count what the server does.", media="text/plain"),
    Route("GET", "/openapi.json", "openapi", openapi_document, Scope.READ, "This document."),
    Route("GET", "/v1/models", "listModels", models, Scope.READ, "List the models."),
    Route("GET", "/v1/capabilities", "capabilities", capabilities, Scope.READ, "Say what the server can do."),
)
