/* Commands other than reads and writes, and other functions of SRBs. */
#include "disk.h"

enum { KEY_UNIT_ATTENTION = 6, MAX_ATTEMPTS = 4 };

u8 *scratch;
u8 address_target, address_lun;
struct Answer answer;

void big_endian(u8 *to, u64 value, int bytes)
{
    while (bytes--) {
        to[bytes] = value;
        value >>= 8;
    }
}

u64 from_big_endian(const u8 *from, int bytes)
{
    u64 value = 0;
    while (bytes--)
        value = value << 8 | *from++;
    return value;
}

static void prepare(Request *request, u32 function, u32 direction, u32 length)
{
    request_clear(request);
    request->srb->SrbFunction = function;
    request->srb->SrbFlags = direction | SRB_FLAGS_QUEUE_ACTION_ENABLE;
    request->srb->DataTransferLength = length;
    request->srb->DataBuffer = length ? scratch : NULL;
    request->address->Target = address_target;
    request->address->Lun = address_lun;
    if (length) {
        request->list->NumberOfElements = 1;
        request->list->List[0].PhysicalAddress.QuadPart = (LONGLONG)scratch;
        request->list->List[0].Length = length;
    }
}

/* Sends the prepared request, and stores its result in `answer`. */
static void send_and_wait(Request *request)
{
    submit(disk.adapter, request);
    if (disk.sent)
        disk.sent();
    if (!wait_until_idle(disk.adapter, disk.seconds)) {
        io.lost = disk.adapter->queue.outstanding;
        give_up("command");
    }
    request->list->NumberOfElements = 0;
    answer.complete = request->state == DONE && request->completions == 1;
    answer.status = request->srb->SrbStatus;
    answer.length = request->srb->DataTransferLength;
    answer.sense = answer.status & SRB_STATUS_AUTOSENSE_VALID ? sense_of(request) : 0;
    request->state = IDLE;
}

static int succeeded(void)
{
    u8 status = SRB_STATUS(answer.status);
    /* An underrun is fine: the answer is shorter than the buffer. */
    int underrun = status == SRB_STATUS_DATA_OVERRUN;
    return answer.complete && (status == SRB_STATUS_SUCCESS || underrun);
}

int command(u32 direction, u32 length, int cdb_length, ...)
{
    u8 cdb[16] = {0};
    va_list list;
    va_start(list, cdb_length);
    for (int i = 0; i < cdb_length; i++)
        cdb[i] = va_arg(list, int);
    va_end(list);
    if (direction != TO_DISK)
        memset(scratch, 0, length);
    for (int attempt = 0; attempt < MAX_ATTEMPTS; attempt++) {
        prepare(requests[0], SRB_FUNCTION_EXECUTE_SCSI, direction, length);
        memcpy(requests[0]->command->Cdb, cdb, cdb_length);
        requests[0]->command->CdbLength = cdb_length;
        send_and_wait(requests[0]);
        if (!answer.complete || answer.sense >> 16 != KEY_UNIT_ATTENTION)
            break;
        disk.attentions++;
        /* The used element of an answer without data is shorter. */
        wrong.used_lengths = 0;
    }
    return succeeded();
}

int srb_function(u32 function)
{
    prepare(requests[0], function, 0, 0);
    requests[0]->srb->NumSrbExData = 0;
    send_and_wait(requests[0]);
    return succeeded();
}

int adapter_control(SCSI_ADAPTER_CONTROL_TYPE type)
{
    Adapter *adapter = disk.adapter;
    HW_ADAPTER_CONTROL *control = adapter->hw.HwAdapterControl;
    int alone = type == ScsiStopAdapter || type == ScsiRestartAdapter;
    if (alone)
        processors_hold();
    int success = control(adapter->extension, type, NULL) == ScsiAdapterControlSuccess;
    adapter->stopped = type == ScsiStopAdapter;
    if (alone)
        processors_release();
    return success;
}
