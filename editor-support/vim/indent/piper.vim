" Indentation of .piper scripts: a line that ends in `:` opens a block, `else` and `elif` go back to their `if`,
" `return` closes a block, and a line inside brackets stands one step in from the line that opened them.

if exists("b:did_indent")
  finish
endif
let b:did_indent = 1

setlocal indentexpr=PiperIndent(v:lnum)
setlocal indentkeys=!^F,o,O,<:>,0=elif,0=else,0),0],0}
setlocal autoindent nolisp nosmartindent
let b:undo_indent = "setlocal indentexpr< indentkeys< autoindent< lisp< smartindent<"

if exists("*PiperIndent")
  finish
endif

" Strings and comments hold brackets and colons that mean nothing. synstack() and not synID(): it also answers for an
" empty line, which is what a new line is.
function! s:IsText(line, column) abort
  let stack = synstack(a:line, a:column)
  return !empty(stack) && synIDattr(stack[-1], "name") =~# '^piper\%(Comment\|String\|Doc\|Escape\|BadEscape\|Unclosed\)$'
endfunction

" The line of the innermost bracket that is open where line `lnum` starts; 0 when there is none.
function! s:OpenBracket(lnum) abort
  call cursor(a:lnum, 1)
  return searchpair('[[({]', '', '[])}]', 'bnW', 's:IsText(line("."), col("."))', max([1, a:lnum - 100]))
endfunction

" The line that the statement ending in line `lnum` starts with.
function! s:StatementStart(lnum) abort
  let first = a:lnum
  let opened = s:OpenBracket(first)
  while opened > 0
    let first = opened
    let opened = s:OpenBracket(first)
  endwhile
  return first
endfunction

" Whether a triple-quoted text goes on where line `lnum` ends.
function! s:TextGoesOn(lnum) abort
  return !empty(filter(synstack(a:lnum, col([a:lnum, "$"])), 'synIDattr(v:val, "name") ==# "piperDoc"'))
endfunction

function! s:OpensBlock(lnum) abort
  let colon = match(getline(a:lnum), ':\s*\%(#.*\)\?$')
  return colon >= 0 && !s:IsText(a:lnum, colon + 1)
endfunction

" Where the `if` of an `else` or `elif` in line `lnum` stands: the nearest one above that is not inside a deeper block.
function! s:BranchIndent(lnum) abort
  let limit = -1
  let above = prevnonblank(a:lnum - 1)
  while above > 0
    if limit < 0 || indent(above) < limit
      if getline(above) =~# '^\s*\%(if\|elif\)\>' && s:OpensBlock(above)
        return indent(above)
      endif
      let limit = indent(above)
    endif
    let above = prevnonblank(above - 1)
  endwhile
  return -1
endfunction

function! PiperIndent(lnum) abort
  let above = prevnonblank(a:lnum - 1)
  if above == 0
    return 0
  endif
  if s:TextGoesOn(a:lnum - 1)
    return -1
  endif
  let opened = s:OpenBracket(a:lnum)
  if opened > 0
    return indent(opened) + (getline(a:lnum) =~# '^\s*[])}]' ? 0 : shiftwidth())
  endif
  if getline(a:lnum) =~# '^\s*\%(elif\|else\)\>'
    return s:BranchIndent(a:lnum)
  endif
  let start = s:StatementStart(above)
  if s:OpensBlock(above)
    return indent(start) + shiftwidth()
  endif
  return indent(start) - (getline(start) =~# '^\s*return\>' ? shiftwidth() : 0)
endfunction
