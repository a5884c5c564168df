" Editing .piper scripts: four spaces, never tabs, as `piperc fmt` writes and the parser wants them.

if exists("b:did_ftplugin")
  finish
endif
let b:did_ftplugin = 1

setlocal expandtab shiftwidth=4 softtabstop=4 tabstop=4
setlocal comments=:# commentstring=#\ %s
setlocal suffixesadd=.piper

let b:undo_ftplugin = "setlocal expandtab< shiftwidth< softtabstop< tabstop< comments< commentstring< suffixesadd<"
