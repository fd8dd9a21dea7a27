-- What of the notebooks' Markdown does not go into a PDF, for pandoc.

-- HTML and TeX would be lost or run
function RawBlock() return {} end
function RawInline() return {} end

-- links within the workbook lead nowhere here
function Link(link)
  if not link.target:match("^https?://") then return link.content end
end

-- a picture that is not one of the outputs, which lie here, becomes its caption
function Image(image)
  local file = not image.src:find("/") and io.open(image.src, "rb")
  if not file then return pandoc.Emph(image.caption) end
  file:close()
end

-- columns as wide as their content; of the table of code, as is best for it
function Table(shown)
  for index, column in ipairs(shown.colspecs) do
    shown.colspecs[index] = { column[1], nil }
  end
  return shown
end

function Div(div)
  if div.classes:includes("code") then
    div.content[1].colspecs = { { "AlignLeft", 0.26 }, { "AlignLeft", 0.52 }, { "AlignLeft", 0.22 } }
  end
  return div.content
end
