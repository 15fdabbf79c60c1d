/* Interrupts and deferred procedures of the adapter, on processors that are only numbers: there is
 * one, and a deferred procedure runs as if on the processor for which it was queued. */
#include "shim.h"

#pragma GCC diagnostic ignored "-Wattributes"

enum { MAX_DEFERRED = 64, DEVICE_LEVEL = 5, DEFAULT_THROTTLE = 64 };
typedef struct {
    u32 message, processor;
    KDPC *dpc; /* the driver's own; otherwise NDIS' of a message */
} Queued;
static Queued queue[MAX_DEFERRED];
static u32 queued;
static NDIS_MINIPORT_INTERRUPT_CHARACTERISTICS handlers;
static NDIS_HANDLE handler_context;
static struct {
    IO_INTERRUPT_MESSAGE_INFO info;
    IO_INTERRUPT_MESSAGE_INFO_ENTRY more[MAX_MESSAGES];
} table;
static u32 processors = 1;
Deferred deferred;
u32 throttle = DEFAULT_THROTTLE;
u32 processor;

KIRQL ndis_raise(KIRQL level)
{
    KIRQL before = irql;
    if (before < level)
        irql = level;
    return before;
}

void ndis_lower(KIRQL level)
{
    mistakes.levels += level > irql;
    irql = level;
}

ULONG ndis_processor(PPROCESSOR_NUMBER number)
{
    if (number)
        *number = (PROCESSOR_NUMBER){.Number = processor};
    return processor;
}

NTSTATUS KeGetProcessorNumberFromIndex(ULONG index, PPROCESSOR_NUMBER number)
{
    *number = (PROCESSOR_NUMBER){.Number = index};
    return index < processors ? STATUS_SUCCESS : STATUS_INVALID_PARAMETER;
}

ULONG KeGetProcessorIndexFromNumber(PPROCESSOR_NUMBER number)
{
    return number->Number < processors ? number->Number : INVALID_PROCESSOR_INDEX;
}

ULONG NdisGroupActiveProcessorCount(USHORT)
{
    return processors;
}

void interrupts_connect(u32 count)
{
    processors = count;
    memset(&table, 0, sizeof table);
    table.info.MessageCount = nic.interrupts.messages;
}

void interrupts_forget(void)
{
    memset(&handlers, 0, sizeof handlers);
    queued = 0;
    processor = 0;
    throttle = DEFAULT_THROTTLE;
    memset(&deferred, 0, sizeof deferred);
}

NDIS_STATUS NdisMRegisterInterruptEx(NDIS_HANDLE, NDIS_HANDLE context,
                                     NDIS_MINIPORT_INTERRUPT_CHARACTERISTICS *it,
                                     PNDIS_HANDLE handle)
{
    level_at_most(PASSIVE_LEVEL, "NdisMRegisterInterruptEx");
    it->InterruptType = NDIS_CONNECT_LINE_BASED;
    if (nic.interrupts.messages && it->MsiSupported) {
        it->InterruptType = NDIS_CONNECT_MESSAGE_BASED;
        it->MessageInfoTable = &table.info;
    }
    handlers = *it;
    handler_context = context;
    *handle = &handlers;
    return NDIS_STATUS_SUCCESS;
}

VOID NdisMDeregisterInterruptEx(NDIS_HANDLE)
{
    level_at_most(PASSIVE_LEVEL, "NdisMDeregisterInterruptEx");
    ndis_poll();
    memset(&handlers, 0, sizeof handlers);
    queued = 0;
}

BOOLEAN NdisMSynchronizeWithInterruptEx(NDIS_HANDLE, ULONG,
                                        MINIPORT_SYNCHRONIZE_INTERRUPT_HANDLER handler, PVOID it)
{
    KIRQL before = ndis_raise(DEVICE_LEVEL);
    BOOLEAN done = handler(it);
    irql = before;
    return done;
}

/* Deferred procedures. */

static BOOLEAN defer(Queued it)
{
    for (u32 i = 0; i < queued; i++)
        if (!memcmp(&queue[i], &it, sizeof it))
            return FALSE;
    if (queued == MAX_DEFERRED) {
        print("fail netkvm: more than %u deferred procedures\n", MAX_DEFERRED);
        machine_end();
    }
    queue[queued++] = it;
    return TRUE;
}

ULONG NdisMQueueDpcEx(NDIS_HANDLE, ULONG message, PGROUP_AFFINITY where, PVOID)
{
    ULONG number = __builtin_ctzll(where->Mask);
    mistakes.requests += !where->Mask || (where->Mask & (where->Mask - 1)) || number >= processors;
    deferred.again += irql == DISPATCH_LEVEL;
    defer((Queued){.message = message, .processor = number});
    return where->Mask;
}

/* Inline functions of the header use it, so that it cannot have its own name. */
static VOID initialize_dpc(PRKDPC dpc, PKDEFERRED_ROUTINE routine, PVOID context)
{
    memset(dpc, 0, sizeof *dpc);
    dpc->DeferredRoutine = routine;
    dpc->DeferredContext = context;
}

BOOLEAN KeInsertQueueDpc(PRKDPC dpc, PVOID, PVOID)
{
    return defer((Queued){.processor = processor, .dpc = dpc});
}

static void run_deferred(Queued it)
{
    NDIS_RECEIVE_THROTTLE_PARAMETERS limits = {.MaxNblsToIndicate = throttle};
    u32 before = processor;
    irql = DISPATCH_LEVEL;
    processor = it.processor;
    deferred.total++;
    if (it.dpc) {
        it.dpc->DeferredRoutine(it.dpc, it.dpc->DeferredContext, NULL, NULL);
    } else if (handlers.InterruptType == NDIS_CONNECT_MESSAGE_BASED) {
        deferred.by_message[it.message]++;
        handlers.MessageInterruptDpcHandler(handler_context, it.message, NULL, &limits, NULL);
    } else {
        handlers.InterruptDpcHandler(handler_context, NULL, &limits, NULL);
    }
    mistakes.levels += irql != DISPATCH_LEVEL;
    irql = PASSIVE_LEVEL;
    processor = before;
}

/* Two messages for each processor, as the driver asks for them when Windows assigns resources. */
static u32 processor_of(u32 message)
{
    return message / 2 % processors;
}

static int service_message(u32 message)
{
    BOOLEAN dpc = FALSE;
    ULONG targets = 0;
    irql = DEVICE_LEVEL;
    processor = processor_of(message);
    BOOLEAN claimed = handlers.MessageInterruptHandler(handler_context, message, &dpc, &targets);
    irql = PASSIVE_LEVEL;
    if (dpc)
        defer((Queued){.message = message, .processor = processor});
    processor = 0;
    return claimed;
}

static int service_line(void)
{
    BOOLEAN dpc = FALSE;
    ULONG targets = 0;
    irql = DEVICE_LEVEL;
    BOOLEAN claimed = handlers.InterruptHandler(handler_context, &dpc, &targets);
    irql = PASSIVE_LEVEL;
    if (dpc)
        defer((Queued){0});
    return claimed;
}

u32 interrupts_sticky(void)
{
    u32 claimed = 0;
    for (u32 i = 0; i < STICKY_CALLS && !nic.interrupts.messages; i++) {
        service_line();
        claimed += service_line();
    }
    ndis_poll();
    return claimed;
}

static int poll_messages(Interrupts *it)
{
    int any = 0;
    for (u32 message = 0; message < it->messages; message++)
        while (message_arrived(it, message)) {
            any = 1;
            it->unclaimed_messages += !service_message(message);
        }
    return any;
}

static int poll_line(Interrupts *it)
{
    int any = 0;
    for (u32 pin = 0; pin < INTX_PINS; pin++) {
        volatile u32 *count = &interrupt_counts[0][INTX_VECTOR + pin];
        if (!*count)
            continue;
        *count = 0;
        any = 1;
        it->intx_fired++;
        it->intx_ended_early += !is_in_service(INTX_VECTOR + pin);
        it->intx_unclaimed += !service_line();
        end_of_interrupt_intx();
    }
    return any;
}

/* Does nothing at a level at which interrupts and deferred procedures would have to wait. */
int ndis_poll(void)
{
    int any = 0;
    if (!handlers.InterruptHandler || irql > APC_LEVEL)
        return 0;
    if (handlers.InterruptType == NDIS_CONNECT_MESSAGE_BASED)
        any = poll_messages(&nic.interrupts);
    else
        any = poll_line(&nic.interrupts);
    while (queued) {
        Queued first = queue[0];
        queued--;
        memmove(queue, queue + 1, queued * sizeof *queue);
        run_deferred(first);
        any = 1;
    }
    return any | run_work_items_ndis();
}

#define IMPORT(name) void *__imp_##name = (void *)name
void *__imp_KeInitializeDpc = (void *)initialize_dpc;
IMPORT(KeInsertQueueDpc);
