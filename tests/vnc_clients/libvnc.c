/* A viewer for the tests, made with LibVNC's client library: it saves its picture on request.
 *
 * Arguments: ADDRESS ENCODINGS BITS ORDER QUALITY COMPRESSION. ADDRESS is HOST:PORT or a path,
 * ORDER is `big` or `little`, QUALITY is `none` for no JPEG. Name, password and the trusted
 * certificate are in the environment: VNC_USER, VNC_PASSWORD, VNC_CA. Each line of standard
 * input is a request:
 *
 *   picture PATH      writes the pixels there (blue, green, red, 0); answers the size
 *   key SYMBOL DOWN   sends a key
 *   pointer X Y BUTTONS
 *   moved             answers how many pixels were moved by CopyRect
 *   size WIDTH HEIGHT requests this size of the desktop
 *   cursor            answers the pointer's size, and the number of its visible pixels
 */
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <rfb/rfbclient.h>

static char *password(rfbClient *client)
{
	const char *text = getenv("VNC_PASSWORD");
	(void)client;
	return strdup(text ? text : "");
}

static char *copy(const char *name)
{
	const char *text = getenv(name);
	return text ? strdup(text) : NULL;
}

static rfbCredential *credential(rfbClient *client, int type)
{
	rfbCredential *answer = calloc(1, sizeof *answer);
	(void)client;
	if (type == rfbCredentialTypeX509) {
		answer->x509Credential.x509CACertFile = copy("VNC_CA");
		answer->x509Credential.x509CrlVerifyMode = rfbX509CrlVerifyNone;
	} else {
		answer->userCredential.username = copy("VNC_USER");
		answer->userCredential.password = copy("VNC_PASSWORD");
	}
	return answer;
}

static int cursor[3];

static void pointed(rfbClient *client, int x, int y, int width, int height, int bytes)
{
	(void)x, (void)y, (void)bytes;
	cursor[0] = width, cursor[1] = height, cursor[2] = 0;
	for (int at = 0; at < width * height; at++)
		cursor[2] += client->rcMask[at] != 0;
}

static void log_error(const char *format, ...)
{
	va_list words;
	va_start(words, format);
	vfprintf(stderr, format, words);
	va_end(words);
}

static int set_format(rfbPixelFormat *format, int bits, int big)
{
	format->bitsPerPixel = bits;
	format->trueColour = 1;
	format->bigEndian = big;
	switch (bits) {
	case 32:
		format->depth = 24;
		format->redMax = format->greenMax = format->blueMax = 255;
		format->redShift = 16, format->greenShift = 8, format->blueShift = 0;
		return 1;
	case 16:
		format->depth = 16;
		format->redMax = 31, format->greenMax = 63, format->blueMax = 31;
		format->redShift = 11, format->greenShift = 5, format->blueShift = 0;
		return 1;
	case 8:
		format->depth = 8;
		format->redMax = 7, format->greenMax = 7, format->blueMax = 3;
		format->redShift = 0, format->greenShift = 3, format->blueShift = 6;
		return 1;
	default:
		return 0;
	}
}

static GotCopyRectProc move_pixels;
static unsigned long moved;

static void count_moved(rfbClient *client, int x, int y, int width, int height, int to_x, int to_y)
{
	moved += (unsigned long)width * height;
	move_pixels(client, x, y, width, height, to_x, to_y);
}

static unsigned intensity(unsigned pixel, unsigned max, unsigned shift)
{
	return ((pixel >> shift & max) * 255 + max / 2) / max;
}

/* A pixel in the client's format. */
static unsigned pixel_at(const rfbClient *client, size_t index)
{
	unsigned bytes = client->format.bitsPerPixel / 8, pixel = 0;
	const uint8_t *from = client->frameBuffer + index * bytes;
	for (unsigned at = 0; at < bytes; at++)
		pixel |= (unsigned)from[client->format.bigEndian ? bytes - 1 - at : at] << 8 * at;
	return pixel;
}

static int picture(const rfbClient *client, const char *path)
{
	const rfbPixelFormat *format = &client->format;
	size_t count = (size_t)client->width * client->height;
	uint8_t *out = malloc(4 * count);
	FILE *file = fopen(path, "wb");
	if (!out || !file)
		return 0;
	for (size_t at = 0; at < count; at++) {
		unsigned pixel = pixel_at(client, at);
		out[4 * at] = intensity(pixel, format->blueMax, format->blueShift);
		out[4 * at + 1] = intensity(pixel, format->greenMax, format->greenShift);
		out[4 * at + 2] = intensity(pixel, format->redMax, format->redShift);
		out[4 * at + 3] = 0;
	}
	size_t written = fwrite(out, 4, count, file);
	free(out);
	return fclose(file) == 0 && written == count;
}

/* Handles one request; 0 if it is unknown or fails. */
static int heed(rfbClient *client, const char *line)
{
	char path[4096];
	unsigned one, two, three;
	if (sscanf(line, "picture %4095s", path) == 1) {
		if (!picture(client, path))
			return 0;
		printf("picture %d %d\n", client->width, client->height);
		return 1;
	}
	if (sscanf(line, "key %u %u", &one, &two) == 2)
		return SendKeyEvent(client, one, two) && puts("done") >= 0;
	if (sscanf(line, "pointer %u %u %u", &one, &two, &three) == 3)
		return SendPointerEvent(client, one, two, three) && puts("done") >= 0;
	if (!strcmp(line, "moved"))
		return printf("moved %lu\n", moved) >= 0;
	if (!strcmp(line, "cursor")) {
		printf("cursor %d %d %d\n", cursor[0], cursor[1], cursor[2]);
		return 1;
	}
	if (sscanf(line, "size %u %u", &one, &two) == 2)
		return SendExtDesktopSize(client, one, two) && puts("done") >= 0;
	return 0;
}

/* Handles the requests that have arrived; 0 at the end of the input or after a failure. */
static int listen_to(rfbClient *client)
{
	static char line[8192];
	static size_t length;
	ssize_t got = read(STDIN_FILENO, line + length, sizeof line - 1 - length);
	char *end;
	if (got <= 0)
		return 0;
	length += got;
	line[length] = 0;
	while ((end = strchr(line, '\n'))) {
		*end = 0;
		if (!heed(client, line)) {
			fprintf(stderr, "`%s` was not done\n", line);
			return 0;
		}
		fflush(stdout);
		length -= end + 1 - line;
		memmove(line, end + 1, length + 1);
	}
	return 1;
}

static int connect_to(rfbClient *client, char *address)
{
	char *port = strrchr(address, ':');
	if (address[0] != '/' && port) {
		*port = 0;
		client->serverPort = atoi(port + 1);
	}
	client->serverHost = strdup(address);
	return rfbInitClient(client, NULL, NULL);
}

int main(int count, char **words)
{
	rfbClient *client = rfbGetClient(8, 3, 4);
	if (count != 7 || !set_format(&client->format, atoi(words[3]), !strcmp(words[4], "big"))) {
		fputs("usage: libvnc ADDRESS ENCODINGS BITS ORDER QUALITY COMPRESSION\n", stderr);
		return 2;
	}
	rfbClientLog = rfbClientErr = log_error;
	client->appData.encodingsString = words[2];
	client->appData.enableJPEG = strcmp(words[5], "none") != 0;
	client->appData.qualityLevel = atoi(words[5]);
	client->appData.compressLevel = atoi(words[6]);
	client->appData.shareDesktop = TRUE;
	client->canHandleNewFBSize = TRUE;
	move_pixels = client->GotCopyRect;
	client->GotCopyRect = count_moved;
	client->appData.useRemoteCursor = TRUE;
	client->GotCursorShape = pointed;
	client->GetPassword = password;
	client->GetCredential = credential;
	/* On failure the library has freed the client. */
	if (!connect_to(client, words[1]))
		return 1;
	puts("connected");
	fflush(stdout);
	for (;;) {
		struct pollfd ready[] = {{STDIN_FILENO, POLLIN, 0}, {client->sock, POLLIN, 0}};
		if (!client->buffered && poll(ready, 2, -1) < 0)
			break;
		if (client->buffered || ready[1].revents) {
			if (!HandleRFBServerMessage(client))
				return 1;
		}
		if (ready[0].revents && !listen_to(client))
			break;
	}
	rfbClientCleanup(client);
	return 0;
}
