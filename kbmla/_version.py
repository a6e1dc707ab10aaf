# SPDX-License-Identifier: Apache-2.0
"""The package's version; read by the build without importing the package."""

__version__ = "0.1.0"
