/* StorPortExtendedFunction: one function for each code that the drivers use. */
#include "port.h"

/* The mark of an initialized DPC. */
enum { DPC_MARK = 0x435044 };

typedef ULONG Extended(Adapter *, va_list *);

static ULONG allocate_pool(Adapter *, va_list *list)
{
    SIZE_T length = va_arg(*list, SIZE_T);
    (void)va_arg(*list, ULONG); /* tag */
    *va_arg(*list, PVOID *) = allocate(length, 16);
    return STOR_STATUS_SUCCESS;
}

/* Pool memory and attributes of units need no work. */
static ULONG succeed(Adapter *, va_list *)
{
    return STOR_STATUS_SUCCESS;
}

static ULONG acquire_message_lock(Adapter *adapter, va_list *list)
{
    ULONG message = va_arg(*list, ULONG);
    *va_arg(*list, PULONG) = 0; /* the old IRQL */
    if (message < MAX_MESSAGES)
        lock(adapter, &adapter->message_lock[message]);
    else
        adapter->calls.lock_errors++;
    return STOR_STATUS_SUCCESS;
}

static ULONG release_message_lock(Adapter *adapter, va_list *list)
{
    ULONG message = va_arg(*list, ULONG);
    if (message < MAX_MESSAGES)
        unlock(adapter, &adapter->message_lock[message]);
    else
        adapter->calls.lock_errors++;
    return STOR_STATUS_SUCCESS;
}

static ULONG message_information(Adapter *adapter, va_list *list)
{
    ULONG message = va_arg(*list, ULONG);
    PMESSAGE_INTERRUPT_INFORMATION to = va_arg(*list, PMESSAGE_INTERRUPT_INFORMATION);
    if (message >= adapter->interrupts.messages)
        return STOR_STATUS_INVALID_PARAMETER;
    to->MessageId = message;
    to->MessageData = to->InterruptVector = adapter->interrupts.first_vector + message;
    to->MessageAddress.QuadPart = message_address();
    to->InterruptLevel = 5;
    to->InterruptMode = Latched;
    return STOR_STATUS_SUCCESS;
}

static ULONG performance_optimizations(Adapter *adapter, va_list *list)
{
    Performance *performance = &adapter->performance;
    int query = va_arg(*list, int);
    PPERF_CONFIGURATION_DATA data = va_arg(*list, PPERF_CONFIGURATION_DATA);
    if (query) {
        data->Flags = STOR_PERF_DPC_REDIRECTION | STOR_PERF_CONCURRENT_CHANNELS |
                      STOR_PERF_INTERRUPT_MESSAGE_RANGES | STOR_PERF_ADV_CONFIG_LOCALITY |
                      STOR_PERF_OPTIMIZE_FOR_COMPLETION_DURING_STARTIO |
                      STOR_PERF_DPC_REDIRECTION_CURRENT_CPU;
        data->Flags &= ~adapter->mode.withheld_perf;
        return STOR_STATUS_SUCCESS;
    }
    if (data->Flags & STOR_PERF_INTERRUPT_MESSAGE_RANGES) {
        if (data->LastRedirectionMessageNumber >= adapter->interrupts.messages ||
            data->FirstRedirectionMessageNumber > data->LastRedirectionMessageNumber)
            return STOR_STATUS_INVALID_PARAMETER;
        performance->first_message = data->FirstRedirectionMessageNumber;
        performance->last_message = data->LastRedirectionMessageNumber;
    }
    performance->flags = data->Flags;
    performance->channels = data->ConcurrentChannels;
    return STOR_STATUS_SUCCESS;
}

static ULONG startio_parameters(Adapter *adapter, va_list *list)
{
    PSTORAGE_REQUEST_BLOCK srb = va_arg(*list, PSTORAGE_REQUEST_BLOCK);
    PSTARTIO_PERFORMANCE_PARAMETERS to = va_arg(*list, PSTARTIO_PERFORMANCE_PARAMETERS);
    Performance *performance = &adapter->performance;
    u32 processor = ((Request *)srb->PortContext)->processor;
    u32 messages = performance->last_message - performance->first_message + 1;
    if (!(performance->flags & STOR_PERF_CONCURRENT_CHANNELS))
        return STOR_STATUS_UNSUCCESSFUL;
    to->ChannelNumber = performance->channels ? processor % performance->channels : 0;
    to->MessageNumber = performance->first_message + processor % messages;
    return STOR_STATUS_SUCCESS;
}

static ULONG log_event(Adapter *adapter, va_list *list)
{
    PSTOR_LOG_EVENT_DETAILS details = va_arg(*list, PSTOR_LOG_EVENT_DETAILS);
    u32 line = details->DumpData ? *(ULONG *)details->DumpData : 0;
    adapter->calls.errors_logged++;
    print("# driver logs error %u, line %u\n", details->ErrorCode, line);
    return STOR_STATUS_SUCCESS;
}

static ULONG performance_counter(Adapter *, va_list *list)
{
    PLARGE_INTEGER frequency = va_arg(*list, PLARGE_INTEGER);
    PLARGE_INTEGER counter = va_arg(*list, PLARGE_INTEGER);
    if (frequency)
        frequency->QuadPart = 1000000;
    if (counter)
        counter->QuadPart = microseconds();
    return STOR_STATUS_SUCCESS;
}

static ULONG state_change(Adapter *adapter, va_list *)
{
    adapter->calls.state_changes++;
    return STOR_STATUS_SUCCESS;
}

static ULONG enable_passive(Adapter *adapter, va_list *list)
{
    adapter->passive = va_arg(*list, HW_PASSIVE_INITIALIZE_ROUTINE *);
    return TRUE;
}

static ULONG initialize_dpc(Adapter *, va_list *list)
{
    PSTOR_DPC dpc = va_arg(*list, PSTOR_DPC);
    memset(dpc, 0, sizeof *dpc);
    dpc->Routine = va_arg(*list, HW_DPC_ROUTINE *);
    dpc->Mark = DPC_MARK;
    return STOR_STATUS_SUCCESS;
}

/* Returns FALSE for a DPC that is already queued, as in Windows. */
static ULONG issue_dpc(Adapter *adapter, va_list *list)
{
    PSTOR_DPC dpc = va_arg(*list, PSTOR_DPC);
    PVOID first = va_arg(*list, PVOID), second = va_arg(*list, PVOID);
    if (dpc->Mark != DPC_MARK)
        adapter->calls.unsupported++;
    if (dpc->Mark != DPC_MARK || dpc->Queued)
        return FALSE;
    dpc->Argument1 = first;
    dpc->Argument2 = second;
    dpc->Queued = TRUE;
    dpc->Next = NULL;
    if (adapter->last_dpc)
        adapter->last_dpc->Next = dpc;
    else
        adapter->first_dpc = dpc;
    adapter->last_dpc = dpc;
    return TRUE;
}

static ULONG acquire_lock(Adapter *adapter, va_list *list)
{
    int which = va_arg(*list, int);
    PSTOR_DPC dpc = va_arg(*list, PVOID); /* the context of DpcLock */
    PSTOR_LOCK_HANDLE handle = va_arg(*list, PSTOR_LOCK_HANDLE);
    int *of = &adapter->start_lock;
    if (which == DpcLock)
        of = &dpc->Locked;
    else if (which == InterruptLock)
        of = &adapter->interrupt_lock;
    handle->Lock = which;
    handle->Context.Lock = of;
    lock(adapter, of);
    return STOR_STATUS_SUCCESS;
}

static ULONG release_lock(Adapter *adapter, va_list *list)
{
    unlock(adapter, va_arg(*list, PSTOR_LOCK_HANDLE)->Context.Lock);
    return STOR_STATUS_SUCCESS;
}

static const struct {
    STORPORT_FUNCTION_CODE code;
    Extended *function;
} FUNCTIONS[] = {
    {ExtFunctionAllocatePool, allocate_pool},
    {ExtFunctionFreePool, succeed},
    {ExtFunctionAcquireMSISpinLock, acquire_message_lock},
    {ExtFunctionReleaseMSISpinLock, release_message_lock},
    {ExtFunctionGetMessageInterruptInformation, message_information},
    {ExtFunctionInitializePerformanceOptimizations, performance_optimizations},
    {ExtFunctionGetStartIoPerformanceParameters, startio_parameters},
    {ExtFunctionLogSystemEvent, log_event},
    {ExtFunctionQueryPerformanceCounter, performance_counter},
    {ExtFunctionStateChangeDetected, state_change},
    {ExtFunctionSetUnitAttributes, succeed},
    {ExtFunctionEnablePassiveInitialization, enable_passive},
    {ExtFunctionInitializeDpc, initialize_dpc},
    {ExtFunctionIssueDpc, issue_dpc},
    {ExtFunctionAcquireSpinLock, acquire_lock},
    {ExtFunctionReleaseSpinLock, release_lock},
};

ULONG StorPortExtendedFunction(ULONG code, PVOID extension, ...)
{
    Adapter *adapter = adapter_of(extension);
    for (u32 i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++) {
        if (FUNCTIONS[i].code != code)
            continue;
        va_list list;
        va_start(list, extension);
        ULONG result = FUNCTIONS[i].function(adapter, &list);
        va_end(list);
        return result;
    }
    adapter->calls.unsupported++;
    return STOR_STATUS_NOT_IMPLEMENTED;
}
