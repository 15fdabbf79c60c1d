/* Requests: made, started when the driver accepts them, and completed. */
#include "port.h"

Request *request_new(Adapter *adapter)
{
    Request *request = allocate(sizeof *request, 16);
    u32 address = sizeof(STORAGE_REQUEST_BLOCK);
    u32 command = (address + sizeof(STOR_ADDR_BTL8) + 7) & ~7u;
    u8 *srb = allocate(command + sizeof(SRBEX_DATA_SCSI_CDB16), 16);
    request->srb = (STORAGE_REQUEST_BLOCK *)srb;
    request->address = (STOR_ADDR_BTL8 *)(srb + address);
    request->command = (SRBEX_DATA_SCSI_CDB16 *)(srb + command);
    request->srb->MiniportContext = allocate(adapter->hw.SrbExtensionSize, 64);
    STOR_SCATTER_GATHER_LIST *list = NULL;
    request->list = allocate(sizeof *list + MAX_ELEMENTS * sizeof list->List[0], 16);
    request->adapter = adapter;
    return request;
}

/* Resets a request. The SRB extension keeps the driver's old content, as in Windows. */
void request_clear(Request *request)
{
    STORAGE_REQUEST_BLOCK *srb = request->srb;
    PVOID extension = srb->MiniportContext;
    memset(srb, 0, sizeof *srb);
    memset(request->address, 0, sizeof *request->address);
    memset(request->command, 0, sizeof *request->command);
    memset(request->sense, 0, sizeof request->sense);
    srb->Length = FIELD_OFFSET(STORAGE_REQUEST_BLOCK, SrbExDataOffset) + 4;
    srb->Function = SRB_FUNCTION_STORAGE_REQUEST_BLOCK;
    srb->Signature = SRB_SIGNATURE;
    srb->Version = STORAGE_REQUEST_BLOCK_VERSION_1;
    srb->SrbLength = (u8 *)(request->command + 1) - (u8 *)srb;
    srb->TimeOutValue = 30;
    srb->AddressOffset = (u8 *)request->address - (u8 *)srb;
    srb->NumSrbExData = 1;
    srb->SrbExDataOffset[0] = (u8 *)request->command - (u8 *)srb;
    srb->PortContext = request;
    srb->MiniportContext = extension;
    request->address->Type = STOR_ADDRESS_TYPE_BTL8;
    request->address->AddressLength = STOR_ADDR_BTL8_ADDRESS_LENGTH;
    request->command->Type = SrbExDataTypeScsiCdb16;
    request->command->Length = sizeof *request->command - 8;
    request->command->SenseInfoBuffer = request->sense;
    request->command->SenseInfoBufferLength = sizeof request->sense;
    request->list->NumberOfElements = 0;
    request->completions = 0;
    request->state = IDLE;
    request->length = 0;
    request->status = 0xff;
}

static void start_requests(Adapter *adapter)
{
    Queue *queue = &adapter->queue;
    while (queue->first && !queue->paused && !queue->busy_until) {
        Request *request = queue->first;
        queue->first = request->next;
        if (!queue->first)
            queue->last = NULL;
        request->state = STARTED;
        request->processor = queue->started++;
        queue->outstanding++;
        if (queue->outstanding > queue->most_outstanding)
            queue->most_outstanding = queue->outstanding;
        /* Full duplex: HwBuildIo runs without a lock, HwStartIo without the interrupt lock. */
        PSCSI_REQUEST_BLOCK srb = (PSCSI_REQUEST_BLOCK)request->srb;
        if (!adapter->hw.HwBuildIo || adapter->hw.HwBuildIo(adapter->extension, srb))
            adapter->hw.HwStartIo(adapter->extension, srb);
    }
}

void submit(Adapter *adapter, Request *request)
{
    Queue *queue = &adapter->queue;
    request->state = QUEUED;
    request->next = NULL;
    request->length = request->srb->DataTransferLength;
    if (queue->last)
        queue->last->next = request;
    else
        queue->first = request;
    queue->last = request;
    start_requests(adapter);
}

/* StorPort starts a request that the driver refused as busy again, before all others. */
static void start_again(Adapter *adapter, Request *request)
{
    Queue *queue = &adapter->queue;
    adapter->calls.busy_retries++;
    request->completions = 0;
    request->srb->SrbStatus = SRB_STATUS_PENDING;
    request->state = QUEUED;
    request->next = queue->first;
    queue->first = request;
    if (!queue->last)
        queue->last = request;
    if (!queue->busy_until && queue->outstanding)
        queue->busy_until = 1;
}

void complete(Adapter *adapter, PSTORAGE_REQUEST_BLOCK srb)
{
    Request *request = srb->PortContext;
    if (!request || request->srb != srb || request->adapter != adapter) {
        adapter->calls.completed_unknown++;
        return;
    }
    request->completions++;
    if (request->state != STARTED) {
        adapter->calls.completed_twice++;
        return;
    }
    adapter->queue.outstanding--;
    if (adapter->queue.busy_until)
        adapter->queue.busy_until--;
    request->status = SRB_STATUS(srb->SrbStatus);
    request->state = DONE;
    if (request->status == SRB_STATUS_BUSY)
        start_again(adapter, request);
}

static int poll_messages(Adapter *adapter)
{
    Interrupts *it = &adapter->interrupts;
    int any = 0;
    for (u32 message = 0; message < it->messages; message++) {
        volatile u32 *count = &interrupt_counts[it->first_vector + message];
        for (u32 new = *count - it->seen[message]; new; new --) {
            it->seen[message]++;
            it->fired[message]++;
            any = 1;
            if (!adapter->config.HwMSInterruptRoutine(adapter->extension, message))
                it->unclaimed_messages++;
        }
    }
    return any;
}

static int poll_intx(Adapter *adapter)
{
    Interrupts *it = &adapter->interrupts;
    int any = 0;
    for (u32 pin = 0; pin < INTX_PINS; pin++) {
        volatile u32 *count = &interrupt_counts[INTX_VECTOR + pin];
        if (!*count)
            continue;
        *count = 0;
        any = 1;
        it->intx_fired++;
        it->intx_ended_early += !is_in_service(INTX_VECTOR + pin);
        lock(adapter, &adapter->interrupt_lock);
        if (!adapter->hw.HwInterrupt(adapter->extension))
            it->intx_unclaimed++;
        unlock(adapter, &adapter->interrupt_lock);
        end_of_interrupt_intx();
    }
    return any;
}

static int run_dpcs(Adapter *adapter)
{
    int any = 0;
    while (adapter->first_dpc) {
        PSTOR_DPC dpc = adapter->first_dpc;
        adapter->first_dpc = dpc->Next;
        if (!adapter->first_dpc)
            adapter->last_dpc = NULL;
        dpc->Queued = FALSE;
        dpc->Routine(dpc, adapter->extension, dpc->Argument1, dpc->Argument2);
        any = 1;
    }
    return any;
}

int poll_adapter(Adapter *adapter)
{
    int any = poll_messages(adapter);
    if (adapter->mode.polled)
        any |= adapter->hw.HwInterrupt(adapter->extension);
    else if (!adapter->interrupts.messages)
        any |= poll_intx(adapter);
    any |= run_dpcs(adapter);
    if (adapter->queue.paused && microseconds() > adapter->queue.paused_until) {
        adapter->queue.paused = FALSE;
        adapter->calls.pauses_over++;
        any = 1;
    }
    start_requests(adapter);
    return any;
}

/* Prints whether the interrupt or the answer is missing: calls all handlers and looks. */
static void explain_wait(Adapter *adapter)
{
    Queue *queue = &adapter->queue;
    u32 before = queue->outstanding;
    print("# waiting: outstanding=%u queued=%u paused=%u busy=%u dpc=%u", before,
          queue->first != NULL, queue->paused, queue->busy_until, adapter->first_dpc != NULL);
    for (u32 message = 0; message < adapter->interrupts.messages; message++)
        adapter->config.HwMSInterruptRoutine(adapter->extension, message);
    if (!adapter->interrupts.messages)
        adapter->hw.HwInterrupt(adapter->extension);
    poll_adapter(adapter);
    print(before > queue->outstanding ? ": an interrupt is missing\n" : ": no answers\n");
}

int wait_until_idle(Adapter *adapter, u32 seconds)
{
    Queue *queue = &adapter->queue;
    u64 end = microseconds() + seconds * 1000000ull;
    while (queue->outstanding || queue->first || queue->paused) {
        if (microseconds() > end) {
            explain_wait(adapter);
            return 0;
        }
        if (poll_adapter(adapter))
            continue;
        if (!adapter->mode.polled && (queue->outstanding || queue->paused))
            wait_for_interrupt();
    }
    return 1;
}
