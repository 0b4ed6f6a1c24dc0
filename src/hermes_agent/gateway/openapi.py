"""The OpenAPI 3.1 document of the API, made from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import structs

from hermes_agent.gateway.table import Parameter, Route
from hermes_agent.version import VERSION

Json = dict[str, Any]

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "failure": {
                    "type": "object",
                    "properties": {
                        "reason": {"type": "string"},
                        "retryable": {"type": "boolean"},
                        "action": {"type": "string"},
                    },
                },
            },
        }
    },
}


def document(routes: Sequence[Route]) -> Json:
    """The document; the same routes give the same one."""
    bodies = [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: Json = {}
    for route in routes:
        operation = _operation(route)
        if route.body is not None:
            needed = any(field.required for field in structs.fields(route.body))
            schema = {"application/json": {"schema": schema_of[route.body]}}
            operation["requestBody"] = {"required": needed, "content": schema}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "hermes-agent",
            "version": VERSION,
            "description": "Every route also stands behind `/p/{profile}` for a named profile.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> Json:
    good: Json = {"description": HTTPStatus(route.status).phrase, "content": _content(route)}
    failed: Json = {
        "description": "What is wrong, and what to do about it.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    named = [Parameter(name, "", where="path") for name in re.findall(r"{(\w+)}", route.path)]
    found: Json = {
        "operationId": route.name,
        "summary": route.about,
        "parameters": [_parameter(each) for each in (*named, *route.parameters)],
        "responses": {str(route.status): good, "4XX": failed, "5XX": failed},
        "security": [] if route.scope is None else [{"key": []}],
    }
    if route.scope is not None:
        found["x-hermes-scope"] = str(route.scope)
    return found


def _content(route: Route) -> Json:
    if not route.streams:
        return {route.media: {}}
    return {route.media: {}, "text/event-stream": {}}


def _parameter(each: Parameter) -> Json:
    found: Json = {
        "name": each.name, "in": each.where, "required": each.where == "path", "schema": {"type": each.kind},
    }  # fmt: skip
    return {**found, "description": each.about} if each.about else found
