autocmd BufRead,BufNewFile *.piper setfiletype piper
