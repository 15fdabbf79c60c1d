/* Pauses, resets and sleep with packets under way: each is completed, and the next ones arrive. */
#include "traffic.h"

enum { TIMES = 6, UNDER_WAY = 100 };

void leave_traffic(void)
{
    static const Pieces WHOLE = {{0}, 0};
    send_flood(OWN, 500, 700);
    for (u32 i = 0; i < UNDER_WAY; i++)
        echo(200 + i, &WHOLE);
}

/* Interrupts `TIMES` times; what was under way may be lost, but nothing later. */
static void disturb(const char *name, const char *(*stop)(void), const char *(*start)(void))
{
    const char *failed = NULL;
    u32 lost = 0, times = 0;
    for (; times < TIMES && !failed; times++) {
        leave_traffic();
        /* At another time in each turn. */
        traffic_arrived(times);
        failed = stop();
        if (!failed && start)
            failed = start();
        int completed = packets_completed();
        u32 damaged = arrived.wrong + arrived.twice + arrived.unknown;
        lost += traffic_missing();
        if (!completed || damaged || !traffic_settle())
            failed = "packets";
    }
    check(!failed, name, "%s times=%u lost=%u", failed ? failed : "recovered", times, lost);
    send_flood(OWN, 300, 300);
    for (u32 i = 0; i < UNDER_WAY; i++)
        echo(1000, &(Pieces){{500}, 0});
    memset(&arrived, 0, sizeof arrived);
    check_traffic(name, 30000);
}

void check_pauses(void)
{
    disturb("pauses", nic_pause, nic_restart);
}

void check_resets(void)
{
    disturb("resets", nic_reset, NULL);
}

void check_sleeps(void)
{
    disturb("sleeps", nic_sleep, nic_wake);
}
