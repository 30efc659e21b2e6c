"""A test case with a folder of its own for files, for the tests of Python scripts."""

import os
import tempfile
import unittest


class ScratchCase(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name, text=None):
        """The path of a file in the folder. The file is written if there is a text."""
        path = os.path.join(self.folder, name)
        if text is not None:
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        return path
