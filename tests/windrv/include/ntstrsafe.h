/* Safe strings: the drivers use them for trace messages alone, which are left out. */
