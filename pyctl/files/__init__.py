"""Files on the machine: atomic writes, the user's directories, and the headers and texts of images
and PDFs.
"""
