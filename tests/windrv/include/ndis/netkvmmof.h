/* What Microsoft's compiler makes of NetKVM/Common/netkvm.mof. */
typedef struct {
    ULONG level;
} NetKvm_Logging;
typedef struct {
    UCHAR type;
} NetKvm_DiagReset;
typedef struct {
    BOOLEAN value;
} NetKvm_DeviceRss;
typedef struct {
    ULONG NumOfQueues, RxQueueSize, TxQueueSize;
    BOOLEAN RscEnabledv4, RscEnabledv6, Standby;
    ULONG MemoryKB;
    LONG InitTimeMs, LazyAllocTimeMs, UsoEnabledv4, UsoEnabledv6;
} NetKvm_Config;
typedef struct {
    struct {
        ULONG LargeOffload, UdpOffload, ChecksumOffload, MinFreeBuffers, Copied, Dropped;
    } tx;
    struct {
        ULONG CoalescedWin, CoalescedHost, ChecksumOK, Priority, MinFreeBuffers, LowResources;
    } rx;
    struct {
        BOOLEAN DeviceRssSupport, DeviceHashSupport, DeviceRssOn;
        ULONG Hits, Misses, Unclassified, Errors;
    } rss;
    struct {
        ULONG Commands, CommandsTimedOut, CommandsFailed;
    } ctrl;
} NetKvm_Diag;
#define NetKvm_Logging_SIZE sizeof(NetKvm_Logging)
#define NetKvm_DiagReset_SIZE sizeof(NetKvm_DiagReset)
#define NetKvm_DeviceRss_SIZE sizeof(NetKvm_DeviceRss)
#define NetKvm_Config_SIZE sizeof(NetKvm_Config)
#define NetKvm_Diag_SIZE sizeof(NetKvm_Diag)
/* The checks ask by number, and need no GUIDs. */
#define NetKvm_LoggingGuid                                                                         \
    {                                                                                              \
        0                                                                                          \
    }
#define NetKvm_DiagResetGuid                                                                       \
    {                                                                                              \
        0                                                                                          \
    }
#define NetKvm_DeviceRssGuid                                                                       \
    {                                                                                              \
        0                                                                                          \
    }
#define NetKvm_ConfigGuid                                                                          \
    {                                                                                              \
        0                                                                                          \
    }
#define NetKvm_DiagGuid                                                                            \
    {                                                                                              \
        0                                                                                          \
    }
