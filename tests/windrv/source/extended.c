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
        COUNT(adapter->calls.lock_errors);
    return STOR_STATUS_SUCCESS;
}

static ULONG release_message_lock(Adapter *adapter, va_list *list)
{
    ULONG message = va_arg(*list, ULONG);
    if (message < MAX_MESSAGES)
        unlock(adapter, &adapter->message_lock[message]);
    else
        COUNT(adapter->calls.lock_errors);
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
    to->MessageAddress.QuadPart = message_address(adapter->interrupts.target[message]);
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
    if (data->Flags & STOR_PERF_ADV_CONFIG_LOCALITY)
        for (u32 message = 0; message <= performance->last_message; message++)
            data->MessageTargets[message].Mask = 1ull << adapter->interrupts.target[message];
    performance->flags = data->Flags;
    performance->channels = data->ConcurrentChannels;
    return STOR_STATUS_SUCCESS;
}

/* The driver's message that arrived at this processor at the start, or one in turn. */
static u32 best_message(Adapter *adapter, u32 processor)
{
    Performance *performance = &adapter->performance;
    u32 first = performance->first_message, last = performance->last_message;
    for (u32 message = first; adapter->mode.together && message <= last; message++)
        if (message % adapter->mode.processors == processor)
            return message;
    return first + processor % (last - first + 1);
}

static ULONG startio_parameters(Adapter *adapter, va_list *list)
{
    PSTORAGE_REQUEST_BLOCK srb = va_arg(*list, PSTORAGE_REQUEST_BLOCK);
    PSTARTIO_PERFORMANCE_PARAMETERS to = va_arg(*list, PSTARTIO_PERFORMANCE_PARAMETERS);
    Performance *performance = &adapter->performance;
    u32 processor = ((Request *)srb->PortContext)->processor;
    /* After a restart, vioscsi asks for messages, but not for channels. */
    u32 known = STOR_PERF_CONCURRENT_CHANNELS | STOR_PERF_INTERRUPT_MESSAGE_RANGES;
    if (!(performance->flags & known))
        return STOR_STATUS_UNSUCCESSFUL;
    to->ChannelNumber = performance->channels ? processor % performance->channels : 0;
    to->MessageNumber = best_message(adapter, processor);
    return STOR_STATUS_SUCCESS;
}

static ULONG log_event(Adapter *adapter, va_list *list)
{
    PSTOR_LOG_EVENT_DETAILS details = va_arg(*list, PSTOR_LOG_EVENT_DETAILS);
    u32 line = details->DumpData ? *(ULONG *)details->DumpData : 0;
    COUNT(adapter->calls.errors_logged);
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
    COUNT(adapter->calls.state_changes);
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
        COUNT(adapter->calls.unsupported);
    if (dpc->Mark != DPC_MARK || __atomic_exchange_n(&dpc->Queued, TRUE, __ATOMIC_ACQUIRE))
        return FALSE;
    Dpcs *dpcs = &adapter->dpcs[this_processor()];
    dpc->Argument1 = first;
    dpc->Argument2 = second;
    dpc->Next = NULL;
    if (dpcs->last)
        dpcs->last->Next = dpc;
    else
        dpcs->first = dpc;
    dpcs->last = dpc;
    return TRUE;
}

static ULONG acquire_lock(Adapter *adapter, va_list *list)
{
    int which = va_arg(*list, int);
    PSTOR_DPC dpc = va_arg(*list, PVOID); /* the context of DpcLock */
    PSTOR_LOCK_HANDLE handle = va_arg(*list, PSTOR_LOCK_HANDLE);
    handle->Lock = which;
    handle->Context.Lock = which == DpcLock ? &dpc->Locked : &adapter->start_lock[0];
    if (which == InterruptLock)
        lock_interrupts(adapter);
    else
        lock(adapter, handle->Context.Lock);
    return STOR_STATUS_SUCCESS;
}

static ULONG release_lock(Adapter *adapter, va_list *list)
{
    PSTOR_LOCK_HANDLE handle = va_arg(*list, PSTOR_LOCK_HANDLE);
    if (handle->Lock == InterruptLock)
        unlock_interrupts(adapter);
    else
        unlock(adapter, handle->Context.Lock);
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
    COUNT(adapter->calls.unsupported);
    return STOR_STATUS_NOT_IMPLEMENTED;
}
