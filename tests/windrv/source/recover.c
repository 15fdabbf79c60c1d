/* Checks: resets with requests in flight, and stop and restart of the adapter. */
#include "disk.h"

enum { LONG_BLOCKS = 64, KEY_UNIT_ATTENTION = 6 };

/* Results of the requests that were in flight at the reset. */
typedef struct {
    u32 reset, done, other, status;
} Ends;

static u32 slice(void)
{
    return disk.region / MAX_REQUESTS;
}

static u32 long_blocks(void)
{
    return slice() < LONG_BLOCKS ? slice() : LONG_BLOCKS;
}

static void start_requests(u32 depth)
{
    for (u32 i = 1; i <= depth; i++) {
        Transfer it = {.write = i & 1, .block = i * slice(), .shape = i % SHAPES, .max_pieces = 64};
        it.blocks = i % 4 ? 8 : long_blocks();
        transfer(requests[i], it);
    }
}

static void count_end(Request *request, Ends *ends)
{
    io.twice += request->completions != 1;
    if (request->status == SRB_STATUS_BUS_RESET || sense_of(request) >> 16 == KEY_UNIT_ATTENTION) {
        ends->reset++;
    } else if (request->status == SRB_STATUS_SUCCESS) {
        ends->done++;
        if (!request->write)
            verify(request);
    } else {
        ends->other++;
        ends->status = request->srb->SrbStatus;
    }
    /* A write that was reset may or may not have reached the disk. */
    if (request->write && request->status != SRB_STATUS_SUCCESS)
        for (u32 i = 0; i < request->blocks; i++)
            disk.generation[request->block + i] = UNKNOWN;
    pieces_free(request);
    request->state = IDLE;
}

/* The driver completes requests before the device has returned them, and until then the device may
 * write to their memory. 0 if the device has not returned all but `before` chains in time. */
static int let_device_finish(Adapter *adapter, u32 before)
{
    u64 until = microseconds() + disk.seconds * 1000000ull;
    /* With INTx, vioscsi leaves the answer to a reset in the ring if another interrupt came. */
    u32 left = before + !adapter->interrupts.messages;
    while (used_pending() > left && microseconds() < until)
        if (!poll_adapter(adapter) && !adapter->mode.polled)
            wait_for_interrupt();
    return used_pending() <= left;
}

/* All requests must complete exactly once, as done or as reset, and the disk must still work. */
static void reset(const char *name, int (*act)(void), u32 depth)
{
    Adapter *adapter = disk.adapter;
    Ends ends = {0};
    u32 attentions = disk.attentions, before = used_pending();
    io_clear();
    start_requests(depth);
    u32 in_flight = adapter->queue.outstanding;
    int acted = act(), ended = wait_until_idle(adapter, disk.seconds);
    int finished = let_device_finish(adapter, before);
    for (u32 i = 1; i <= depth; i++)
        if (requests[i]->state == DONE)
            count_end(requests[i], &ends);
        else
            ends.other++;
    if (!ended)
        give_up(name);
    /* The used elements of reset requests are shorter. */
    wrong.used_lengths = 0;
    disk.resetting = 1;
    for (u32 i = 1; i <= 4; i++) {
        Transfer it = {.write = 1, .block = i * slice(), .blocks = long_blocks()};
        one(it);
        it.write = 0;
        it.shape = SHIFTED;
        one(it);
    }
    disk.resetting = 0;
    check(acted && finished && !ends.other && io_good(), name,
          "in_flight=%u acted=%u finished=%u reset=%u done=%u other=%u status=%02x failed=%u "
          "last=%02x sense=%06x lost=%u twice=%u short=%u wrong_blocks=%u stray=%u after=%u "
          "attentions=%u",
          in_flight, acted, finished, ends.reset, ends.done, ends.other, ends.status, io.failed,
          io.last_status, io.last_sense, io.lost, io.twice, io.short_ones, wrong.blocks,
          wrong.stray_pages, io.done, disk.attentions - attentions);
}

static int reset_unit(void)
{
    return srb_function(SRB_FUNCTION_RESET_LOGICAL_UNIT);
}

static int reset_device(void)
{
    return srb_function(SRB_FUNCTION_RESET_DEVICE);
}

static int reset_bus(void)
{
    return srb_function(SRB_FUNCTION_RESET_BUS);
}

/* The other way to reset a bus; here vioscsi lets the device complete requests in flight. */
static int call_reset_bus(void)
{
    return disk.adapter->hw.HwResetBus(disk.adapter->extension, 0);
}

void resets(void)
{
    reset("reset.lun.idle", reset_unit, 0);
    reset("reset.lun", reset_unit, 40);
    reset("reset.device", reset_device, 100);
    reset("reset.bus", reset_bus, 7);
    reset("reset.bus.call", call_reset_bus, 30);
}

void restart(void)
{
    for (int turn = 0; turn < 3; turn++) {
        /* vioscsi lacks this function. */
        int flushed = srb_function(SRB_FUNCTION_SHUTDOWN) || disk.scsi;
        u8 status = answer.status;
        int stopped = adapter_control(ScsiStopAdapter);
        int started = adapter_control(ScsiRestartAdapter);
        io_clear();
        for (u32 i = 1; i <= 4; i++) {
            Transfer it = {.block = i * 300, .blocks = LONG_BLOCKS};
            one(it);
            it.write = 1;
            one(it);
            it.write = 0;
            it.shape = SHIFTED;
            one(it);
        }
        check(flushed && stopped && started && io_good(), "restart",
              "flush=%02x stopped=%u started=%u requests=%u failed=%u status=%02x wrong_blocks=%u",
              status, stopped, started, io.done, io.failed, io.last_status, wrong.blocks);
    }
}
