/* Event tracing and debug messages of the drivers: empty. */
#ifndef WINDRV_STORTRCE_H
#define WINDRV_STORTRCE_H
typedef struct _STORAGE_TRACE_INIT_INFO {
    ULONG Size;
    PVOID DriverObject;
    ULONG NumErrorLogRecords;
    PVOID TraceCleanupRoutine, TraceContext;
} STORAGE_TRACE_INIT_INFO;
#define WPP_CLEANUP(...) ((void)0)
#define WPP_INIT_TRACING(...) ((void)0)
#define RhelDbgPrint(...) ((void)0)
#define ENTER_FN()
#define EXIT_FN()
#define EXIT_ERR()
#define ENTER_FN_SRB()
#define EXIT_FN_SRB()
#define ENTER_INL_FN(...)
#define EXIT_INL_FN(...)
#define ENTER_INL_FN_SRB(...)
#define EXIT_INL_FN_SRB(...)
#define LOG_SRB_INFO()
#define LOG_SRB_INFO_FROM_INLFN(...)
#endif
