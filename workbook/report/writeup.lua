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

-- columns as wide as their content, those of numbers to the right; of the table of code, as is best for it
local NUMBER = "^[-+−–±~]?[%d.,]+[%d.,%s×±%%%a/()−–-]*$"

function Table(shown)
  for index, column in ipairs(shown.colspecs) do
    local numbers = column[1] == "AlignDefault" or column[1] == "AlignLeft"
    for _, body in ipairs(shown.bodies) do
      for _, row in ipairs(body.body) do
        local text = pandoc.utils.stringify(row.cells[index].contents)
        numbers = numbers and (text:match(NUMBER) or text == "–" or text == "")
      end
    end
    shown.colspecs[index] = { numbers and "AlignRight" or "AlignLeft", nil }
  end
  return shown
end

function Div(div)
  if div.classes:includes("code") then
    div.content[1].colspecs = { { "AlignLeft", 0.26 }, { "AlignLeft", 0.52 }, { "AlignLeft", 0.22 } }
  end
  return div.content
end
