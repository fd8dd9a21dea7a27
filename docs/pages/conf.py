"""The book as pages, by Sphinx and myst-nb: `make pages` puts executed notebooks and guides beside this file."""

project = "lmcore"
extensions = ["myst_nb", "sphinx.ext.apidoc", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "lmcore"
html_static_path = ["_static"]
html_css_files = ["figures.css"]
html_show_copyright = False

nb_execution_mode = "off"  # they are executed
nb_merge_streams = True
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

default_role = "code"  # docstrings are written as Markdown
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
autodoc_mock_imports = ["triton"]
apidoc_modules = [
    {
        "path": "project/lmcore",
        "destination": "api",
        "separate_modules": True,
        "module_first": True,
        "exclude_patterns": [
            "**/gpu.py",
            "**/hopper.py",
            "**/cli/*",
            "**/__main__.py",
        ],  # device code has no docstrings
    }
]

# Links to files of the project that are no pages, and Markdown that Sphinx reads another way than a code host.
suppress_warnings = ["myst.xref_missing", "myst.header", "myst-nb.mime_priority", "docutils", "ref", "autodoc", "toc"]
