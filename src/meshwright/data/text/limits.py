"""Sizes that bound the memory, and the pieces into which the input is cut.

They are read as attributes of this module, so that a test can change one in a single place.
"""

from __future__ import annotations

# Bytes of a piece of the input.
PIECE = 1 << 20
# Bytes read beyond a piece, within which its last document mostly ends.
REST = 1 << 16
# Bytes of a document; a longer one is rejected.
LONGEST = 1 << 28
# Bytes read at once from a stream.
CHUNK = 1 << 18
# Files or members of an archive in a piece.
MOST_FILES = 1000
# Rows of a table in a piece: a table of repeated texts is far smaller than its contents.
MOST_ROWS = 1 << 13
