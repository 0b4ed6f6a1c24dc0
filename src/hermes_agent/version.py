"""The version, a constant: `hermes --version` must not read package metadata."""

VERSION = "0.1.0"
