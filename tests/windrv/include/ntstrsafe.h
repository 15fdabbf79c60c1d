/* Safe strings: the drivers use them only for trace messages, which are left out. */
#define RtlStringCbVPrintfA(...) STATUS_UNSUCCESSFUL
